"""``python -m tests.chaos``: try every fault at every moment. A dead GPU must not harm the others.

:mod:`tests.chaos.trials` describes the trials and when one fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time

from api.errors import one_line
from integration.simulated import SimulatedNode
from tests.chaos.trials import FAULTS, MOMENTS, Failed, Machine, Outcome
from tests.harness.launcher import make_launcher
from tests.harness.runtime import OURS, Runtime, remove_fifos
from tools.containerd import PrivateContainerd
from tools.images import glibc, write_archive

_HEAD = ("fault", "moment", "told", "preferred", "allocate", "start", "wasted")
_ROW = "{:26} {:10} {:>7} {:>9} {:>8} {:>6} {:>6}"


def row(fault: str, moment: str, outcome: Outcome) -> str:
    """Format a line of the table; times in seconds."""
    told = "-" if outcome.told is None else f"{outcome.told:.1f}"
    times = (f"{value:.2f}" for value in (outcome.preferred, outcome.allocate, outcome.start))
    return _ROW.format(fault, moment, told, *times, outcome.wasted)


def _chosen(words: list[str], known: tuple[str, ...]) -> list[str]:
    return [each for each in known if not words or any(word in each for word in words)]


def main() -> int:
    """Run all trials; return whether all of them passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--fault", action="append", default=[], help="only those with this in it")
    parser.add_argument("--moment", action="append", default=[], choices=MOMENTS)
    given = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        config = os.path.join(directory, "config.toml")
        launcher = make_launcher(os.path.join(directory, "bin"))
        containerd = PrivateContainerd(shim_directory=os.path.dirname(launcher), shim_config=config)

        def configure(node: SimulatedNode) -> None:
            with open(node.config_path, encoding="utf-8") as file:
                text = file.read()
            with open(config, "w", encoding="utf-8") as file:
                file.write(text)

        try:
            archive = write_archive(os.path.join(directory, "image.tar"), [glibc()])
            containerd.start()
            containerd.ctr("images", "import", archive)
            runtime = Runtime(containerd, OURS)
            with Machine(runtime, directory, configure) as machine:
                _say(_ROW.format(*_HEAD))
                for name in _chosen(given.fault, tuple(FAULTS)):
                    for moment in _chosen(given.moment, MOMENTS):
                        failed += not _try(machine, name, moment)
            remove_fifos(containerd)
        finally:
            containerd.remove()
    _say(f"{failed} failed" if failed else "none has taken the node")
    return 1 if failed else 0


def _try(machine: Machine, name: str, moment: str) -> bool:
    begun = time.monotonic()
    try:
        outcome = machine.run(FAULTS[name], moment)
    except (Failed, AssertionError) as error:
        seconds = time.monotonic() - begun
        _say(f"{name:26} {moment:10} FAILED after {seconds:.1f} s: {one_line(str(error))}")
        return False
    _say(row(name, moment, outcome))
    return True


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
