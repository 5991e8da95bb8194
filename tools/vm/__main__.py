"""``python -m tools.vm``: run a command of this checkout in a virtual machine."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
import time
from typing import Final

from api.errors import NvshimError
from integration.simulated import Scenario, SimulatedNode
from integration.simulated.packages import locked
from tools import REPOSITORY
from tools.images import busybox, glibc, write_archive
from tools.vm import machine
from tools.vm.guest import GUESTS, Guest, prepare

# The factor for timeouts, relative to the host.
_PATIENCE: Final = 5

_JOB: Final = """\
set -eu
ip link set lo up
mount --bind {site} {repository}/.cache/site
cd {repository}
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PYTHONPATH={tools} PYTHONDONTWRITEBYTECODE=1 HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis
export NVSHIM_PATIENCE={patience} NVSHIM_TEST_VM={name}
export NVSHIM_TEST_IMAGES={images} NVSHIM_TEST_NODE={node}
echo "$(uname -sr), $(systemctl --version | head -n 1), up for $(cut -d' ' -f1 /proc/uptime) s"
exec {command}
"""


def main(arguments: list[str] | None = None) -> int:
    """Run a command in one guest after another.

    Args:
        arguments: the command line; ``sys.argv`` if None.

    Returns:
        The command's first exit status that is not 0; 1 with one line on stderr if there was
        none.
    """
    options = _parser().parse_args(arguments)
    # Remove the machine and its files before this process exits for any reason.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    worst = 0
    try:
        for name in options.guest or GUESTS:
            worst = worst or _run(name, options.command, options.timeout, options.cgroups)
    except NvshimError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return worst


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.vm",
        description="Run a command of this checkout in virtual machines with Debian.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--guest", action="append", choices=GUESTS, help="the guests to use (default: all)"
    )
    parser.add_argument(
        "--cgroups", type=int, choices=machine.CGROUPS, default=machine.CGROUPS[-1],
        help="the version that systemd sets up (2); 1 needs a systemd that still can, as debian-12",
    )  # fmt: skip
    parser.add_argument("--timeout", type=float, default=7200, help="seconds for each guest (7200)")
    parser.add_argument("command", nargs="+", help="the command, run in the checkout's directory")
    return parser


def _run(name: str, command: list[str], timeout: float, cgroups: int) -> int:
    cache = os.path.realpath(os.path.join(REPOSITORY, ".cache"))
    guests = os.path.join(cache, "vm")
    began = time.monotonic()
    guest = prepare(name, guests, REPOSITORY, say=_say)
    # One machine at a time, because it writes files that all share.
    with locked(guests):
        images = write_archive(os.path.join(guests, "images.tar"), [busybox(), glibc()])
        node = os.path.join(guests, "node")
        shutil.rmtree(node, ignore_errors=True)  # left by a killed run
        with SimulatedNode.create(node, Scenario.load("two"), say=_say):
            _say(f"{name} ready after {time.monotonic() - began:.0f} s")
            began = time.monotonic()
            job = _job(name, guest, command, images=images, node=node)
            shares = [REPOSITORY]
            if not cache.startswith(REPOSITORY + "/"):
                shares.append(cache)
            code = machine.run(
                guest, job, shares=shares, out=sys.stdout.buffer, timeout=timeout, cgroups=cgroups
            )
    _say(f"{name} exited with {code} after {time.monotonic() - began:.0f} s")
    return code


def _job(name: str, guest: Guest, command: list[str], *, images: str, node: str) -> str:
    return _JOB.format(
        command=shlex.join(command),
        images=shlex.quote(images),
        name=name,
        node=shlex.quote(node),
        patience=_PATIENCE,
        repository=shlex.quote(REPOSITORY),
        site=shlex.quote(guest.site),
        tools=shlex.quote(guest.tools),
    )


def _say(line: str) -> None:
    print(f"vm: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
