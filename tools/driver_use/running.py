"""Install a package in a temporary directory, and run its program in containers of the shim."""

from __future__ import annotations

import glob
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Final

from integration.inspection.driver_packages import Package
from integration.simulated.errors import CtrTimeout
from integration.simulated.smoke_test import container_flags
from integration.timeouts import PATIENCE
from tools.containerd import PrivateContainerd
from tools.driver_use.compare import WITHOUT, Observed, Outcome, outcome, shown_by
from tools.driver_use.image import IMAGE, PYTHON
from tools.errors import CheckFailed

__all__ = ["Program", "install", "newest_of", "observe"]

_NAME: Final = "package"
_TO_RUN: Final = 120.0
_TO_INSTALL: Final = 900
_PIP: Final = (sys.executable, "-m", "pip", "--disable-pip-version-check")
_WHEELS: Final = ("--only-binary", ":all:", "--python-version", PYTHON)
_TRACE: Final = (
    "strace", "-f", "-qq", "--seccomp-bpf", "-e", "trace=open,openat,openat2", "-o", "/out/trace",
    "-E", "LD_DEBUG=libs", "-E", "LD_DEBUG_OUTPUT=/out/loader",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Program:
    """The program for a package: a row of ``programs.toml``."""

    text: str  # Python; what it prints is its result
    megabytes: int  # the approximate download
    requirements: tuple[str, ...] = ()  # additional packages, with versions
    source: bool = False  # whether the package has no wheel and is pure Python
    alone: bool = False  # whether to leave out its dependencies


def install(package: Package, program: Program, directory: str, version: str) -> None:
    """Install a package and its dependencies.

    Raises:
        CalledProcessError: pip failed; it has printed the reason.
    """
    wanted = [f"{package.name}=={version}", *program.requirements]
    options = [*(() if program.source else _WHEELS), *(("--no-deps",) if program.alone else ())]
    argv = [*_PIP, "install", "-q", "--no-cache-dir", "--target", directory, *options, *wanted]
    subprocess.run(argv, check=True, timeout=_TO_INSTALL * PATIENCE)


def newest_of(package: Package) -> str:
    """Return the newest version of the index for the image's Python; "" if unknown."""
    argv = [*_PIP, "index", "versions", "--python-version", PYTHON, package.name]
    limit = _TO_INSTALL * PATIENCE
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        return ""
    match = re.match(r"\S+ \((\S+)\)", done.stdout)
    return match[1] if match else ""


def observe(
    containerd: PrivateContainerd, package: Package, program: Program, site: str
) -> Observed:
    """Run a package's program with all capabilities, with those it needs, and without each.

    Args:
        containerd: it has the image.
        site: the directory where the package is installed.

    Raises:
        CtrTimeout: the program does not finish. Its container is removed.
        CheckFailed: its container does not start.
    """
    needs = ",".join(package.needs)
    return Observed(
        _run(containerd, "all", program, site),
        _run(containerd, needs, program, site),
        {each: _run(containerd, WITHOUT[each], program, site) for each in shown_by(package)},
    )


def _run(containerd: PrivateContainerd, capabilities: str, program: Program, site: str) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="trace-", dir=os.path.dirname(site)) as out:
        binds = (f"{site},dst=/site,options=rbind:ro", f"{out},dst=/out,options=rbind:rw")
        flags = [word for bind in binds for word in ("--mount", f"type=bind,src={bind}")]
        environment = ("PYTHONPATH=/site", "HOME=/tmp", "PYTHONWARNINGS=ignore")
        flags += [word for each in environment for word in ("--env", each)]
        try:
            done = containerd.ctr(
                "run", "--rm", *container_flags("all", capabilities), *flags, IMAGE, _NAME,
                *_TRACE, "python3", "-c", program.text,
                check=False,
                timeout=_TO_RUN,
            )  # fmt: skip
        except CtrTimeout:
            containerd.ctr("tasks", "delete", "--force", _NAME)
            containerd.ctr("containers", "delete", _NAME)
            raise
        trace = os.path.join(out, "trace")
        if not os.path.exists(trace):
            raise CheckFailed("to run the package", found=done.stderr or "it was not traced")
        # Pids grow: a child's file comes after its parent's.
        loaders = sorted(glob.glob(os.path.join(out, "loader.*")), key=lambda p: (len(p), p))
        failed = done.stderr.strip().rpartition("\n")[2] if done.code else ""
        return outcome(
            f"{done.stdout}{failed} exit code {done.code}",
            "".join(map(_read, loaders)),
            _read(trace),
        )


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
