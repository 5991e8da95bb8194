"""``python -m tools.driver_use``: run packages that use NVIDIA's driver, and print changes.

Each package is installed in a temporary directory, in the table's version, and runs in containers
of this checkout's shim on a simulated node. If the index has a newer version, that runs, too. The
exit status is 1 if a package differs from the table or could not run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Final

from api.errors import NvshimError
from integration.inspection.driver_packages import Package, known_packages
from integration.simulated.node import SimulatedNode
from integration.simulated.scenario import Scenario
from integration.simulated.smoke_test import shim_directory
from tools import REPOSITORY
from tools.containerd import PrivateContainerd
from tools.driver_use.compare import differences, is_chosen
from tools.driver_use.image import make_image
from tools.driver_use.running import Program, install, newest_of, observe
from tools.images import write_archive

_PROGRAMS: Final = os.path.join(os.path.dirname(__file__), "programs.toml")
_CACHE: Final = os.path.join(REPOSITORY, ".cache")


def programs() -> dict[str, Program]:
    """Return the programs, by the name of the package."""
    with open(_PROGRAMS, "rb") as file:
        rows = tomllib.load(file)
    return {name: _program(**row) for name, row in rows.items()}


def _program(requirements: Iterable[str] = (), **row: Any) -> Program:
    return Program(requirements=tuple(requirements), **row)


def main(words: list[str] | None = None) -> int:
    """Run the packages."""
    parser = argparse.ArgumentParser(prog="python -m tools.driver_use", description=__doc__)
    parser.add_argument("--only", default="", metavar="PACKAGE,…", help="some of the packages")
    parser.add_argument(
        "--megabytes", type=int, default=300, help="leave out packages with a larger download"
    )
    asked = parser.parse_args(words)
    only = [name for name in asked.only.split(",") if name]
    chosen = [each for each in known_packages() if is_chosen(each, only)]
    known = programs()
    run = [p for p in chosen if p.name in known and known[p.name].megabytes <= asked.megabytes]
    _say("not run", [each.name for each in chosen if each not in run])
    try:
        changed = _run_all([(each, known[each.name]) for each in run])
    except NvshimError as error:
        print(f"packages: {error}", file=sys.stderr)
        return 1
    _say("as in the table", [each.name for each in run if each.name not in changed])
    _say("changed", changed)
    return 1 if changed or not run else 0


def _say(what: str, names: list[str]) -> None:
    if names:
        print(f"{what}: {', '.join(names)}")


def _run_all(chosen: list[tuple[Package, Program]]) -> list[str]:
    """Run packages; return the names of packages that differ from the table."""
    changed: list[str] = []
    if not chosen:
        return changed
    with ExitStack() as cleanup:
        directory = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="pkg-", dir=_CACHE))
        node = SimulatedNode.create(os.path.join(directory, "node"), Scenario.of(gpus=2), say=print)
        cleanup.callback(node.remove)
        containerd = cleanup.enter_context(
            PrivateContainerd(shim_directory=shim_directory(), shim_config=node.config_path)
        )
        archive = write_archive(os.path.join(directory, "image.tar"), [make_image()])
        containerd.ctr("images", "import", archive)
        os.unlink(archive)
        for package, program in chosen:
            newest = newest_of(package)
            if not newest:
                print(f"{package.name}: the index does not say which version is the newest")
            for version in dict.fromkeys((package.version, newest or package.version)):
                seen = _look(containerd, package, program, version, directory)
                changed += [] if seen else [package.name]
    return list(dict.fromkeys(changed))


def _look(
    containerd: PrivateContainerd, package: Package, program: Program, version: str, directory: str
) -> bool:
    """Run a version of a package; return whether it matches the table."""
    with tempfile.TemporaryDirectory(prefix="site-", dir=directory) as site:
        try:
            install(package, program, site, version)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"{package.name} {version}: cannot be installed: {error}", flush=True)
            return False
        try:
            seen = observe(containerd, package, program, site)
        except NvshimError as error:
            print(f"{package.name} {version}: cannot be run: {error}", flush=True)
            return False
    found = list(differences(package, seen))
    told = "; ".join(found) or f"as {package.version} in the table"
    result = " ".join(seen.with_all.text.split())[:100]
    print(f"{package.name} {version}: {told} [{result}]", flush=True)
    print(f"  looked for {', '.join(seen.with_all.sought) or 'no file of the driver'}", flush=True)
    return not found


if __name__ == "__main__":
    sys.exit(main())
