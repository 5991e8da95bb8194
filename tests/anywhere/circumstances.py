"""The table of circumstances: what is unusual about a machine, its setup, and its tests."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from tests.anywhere import wrappers

# 12 h 45 min ahead of UTC, and an hour more in summer, which is there from September to April.
_CHATHAM: Final = "<+1245>-12:45<+1345>,M9.5.0/2:45,M4.1.0/3:45"

# Tests that read the wall clock, or compare it with file times or the kernel's clocks.
_CLOCK_TESTS: Final = (
    "tests/unit/causes", "tests/unit/drain/test_marks.py", "tests/unit/inspection",
    "tests/unit/hooks/node", "tests/unit/mounts/test_layers.py", "tests/unit/node/causes",
    "tests/unit/node/health", "tests/unit/node/test_agent.py", "tests/unit/node/test_ledger.py",
    "tests/unit/node/test_monitor_kernel_log.py", "tests/unit/node/test_pod_events.py",
    "tests/unit/shim/test_fast_path.py", "tests/unit/verbs/test_sockets.py",
    "tests/e2e/test_exit_causes.py", "tests/e2e/test_fast_path.py",
)  # fmt: skip
_ONLY_CLOCKS: Final = "no namespace has a wall clock, and a virtual machine takes ten times as long"

# Tests that create or read cgroups.
_CGROUP_TESTS: Final = (
    "tests/unit/shim/test_cgroup.py", "tests/unit/shim/test_oom.py",
    "tests/unit/shim/test_orphans.py", "tests/unit/shim/test_resources.py",
    "tests/unit/shim/test_stats.py", "tests/e2e/test_options.py", "tests/e2e/test_fast_path.py",
)  # fmt: skip
# A guest cannot download into this tree.
_GUEST_NEEDS: Final = ".cache/.vm-packages .cache/.programs"
_ONLY_CGROUPS: Final = "a virtual machine takes ten times as long; the rest sees no cgroup"


@dataclass(frozen=True, slots=True)
class Circumstance:
    """A row of the table."""

    name: str  # the name on the command line
    what: str  # what is unusual about the machine
    # The command that sets it up and runs another; see :mod:`tests.anywhere.wrappers`.
    wrapper: Callable[[str], list[str]]
    tests: tuple[str, ...] = ()  # the tests that run; empty for all
    why: str = ""  # why those tests are enough
    is_guest: bool = False  # whether it has no make, so that pytest is called directly
    needs: str = ""  # targets of the Makefile that install what the wrapper and the tests need

    def command(self, directory: str, more: tuple[str, ...] = ()) -> list[str]:
        """Return the command line.

        Args:
            directory: for files of the circumstance.
            more: paths of tests to run instead of the row's.
        """
        tests = more or self.tests
        if self.is_guest:
            run = ["python3", "-m", "pytest", "--color=no", "-o", "timeout=300", *tests]
        else:
            # Both commands of the README, one after the other.
            run = ["make", "--no-print-directory", "--jobs=1", "demo", "test"]
            run.append(f"TESTS={shlex.join(tests)}")
        return [*self.wrapper(directory), *run]


CIRCUMSTANCES: Final = (
    Circumstance("boot", "booted a minute ago", partial(wrappers.uptime, seconds=60)),
    Circumstance(
        "uptime", "up for 400 days", partial(wrappers.uptime, seconds=400 * 86_400)
    ),
    Circumstance(
        "day-behind", "wall clock set back by a day since the boot",
        partial(wrappers.clock_of_guest, change="day-behind"),
        tests=_CLOCK_TESTS, why=_ONLY_CLOCKS, is_guest=True, needs=_GUEST_NEEDS,
    ),
    Circumstance(
        "leap", "a leap second, then 29 February",
        partial(wrappers.clock_of_guest, change="leap"),
        tests=_CLOCK_TESTS, why=_ONLY_CLOCKS, is_guest=True, needs=_GUEST_NEEDS,
    ),
    Circumstance(
        "timezone", "12:45 hours ahead of UTC", partial(wrappers.timezone, rule=_CHATHAM)
    ),
    Circumstance("hostname", "a name of 63 letters", wrappers.hostname),
    Circumstance("tmpfs", "TMPDIR in memory", wrappers.tmpfs),
    Circumstance("overlay", "TMPDIR on an overlay", wrappers.overlay),
    Circumstance("long-tmpdir", "TMPDIR with a path of 90 letters", wrappers.long_tmpdir),
    Circumstance("no-home", "HOME unset", wrappers.no_home),
    Circumstance("one-cpu", "one processor", wrappers.one_processor),
    Circumstance("nofile", "1,024 open files", partial(wrappers.few_files, limit=1024)),
    Circumstance(
        "cgroup-v1", "cgroups of version 1 under systemd",
        partial(wrappers.in_guest, options=("--guest=debian-12", "--cgroups=1")),
        tests=_CGROUP_TESTS, why=_ONLY_CGROUPS, is_guest=True, needs=_GUEST_NEEDS,
    ),
    Circumstance(
        "cgroup-v2", "cgroups of version 2 under systemd",
        partial(wrappers.in_guest, options=("--guest=debian-12", "--cgroups=2")),
        tests=_CGROUP_TESTS, why=_ONLY_CGROUPS, is_guest=True, needs=_GUEST_NEEDS,
    ),
    Circumstance("stuck-mount", "a mounted file system that never answers", wrappers.stuck_mount),
    Circumstance("odd-names", "a mount and a process with names not in UTF-8", wrappers.odd_names),
    Circumstance("installed", "the product installed and in use", wrappers.installed),
    Circumstance(
        "umask", "umask 077 from the clone on, on a bare Debian 12",
        partial(wrappers.in_root, release="bookworm", umask="077"), needs=".cache/.vm-packages",
    ),
    Circumstance(
        "bare-12", "a Debian 12 with git, make and python3, and a clone",
        partial(wrappers.in_root, release="bookworm"), needs=".cache/.vm-packages",
    ),
    Circumstance(
        "bare-13", "a Debian 13 with git, make and python3, and a clone",
        partial(wrappers.in_root, release="trixie"), needs=".cache/.vm-packages",
    ),
)  # fmt: skip
"""All circumstances, in the order in which they run."""


def together(names: str) -> Circumstance:
    """Return one circumstance, or several combined ("uptime+no-home").

    Only rows that run all tests, on this machine's own root, can be combined.

    Raises:
        ValueError: a name is not in the table, or cannot be combined.
    """
    known = {row.name: row for row in CIRCUMSTANCES}
    words = names.split("+")
    if unknown := [name for name in words if name not in known]:
        msg = f"{', '.join(unknown)}: not among {', '.join(known)}"
        raise ValueError(msg)
    rows = [known[name] for name in words]
    if len(rows) == 1:
        return rows[0]
    if alone := [row.name for row in rows if row.tests or row.needs]:
        msg = f"{', '.join(alone)}: cannot be joined with others"
        raise ValueError(msg)

    def wrapper(directory: str) -> list[str]:
        return [word for row in rows for word in row.wrapper(directory)]

    return Circumstance(names, ", ".join(row.what for row in rows), wrapper)
