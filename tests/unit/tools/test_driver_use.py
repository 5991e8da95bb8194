"""What ``make packages`` reads in traces, and its report of a changed package."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pytest

from integration.inspection.driver_packages import Package, known_packages
from integration.simulated.containerd import Completed
from integration.simulated.errors import CtrTimeout
from tools.driver_use import __main__ as driver_use
from tools.driver_use.__main__ import main, programs
from tools.driver_use.compare import WITHOUT, Observed, differences, outcome
from tools.driver_use.image import PYTHON
from tools.driver_use.running import Program, newest_of

SEARCHED: Final = """\
         9:\tfind library=libz.so.1 [0]; searching
         9:\tfind library=libcuda.so.1 [0]; searching
         9:\tfind library=libnvidia-glsi.so.535.309.01 [0]; searching
         9:\tfind library=libcuda.so.1 [0]; searching
"""
OPENED: Final = """\
9     openat(AT_FDCWD, "/etc/ld.so.cache", O_RDONLY|O_CLOEXEC) = 3
9     openat(AT_FDCWD, "/usr/lib/x86_64-linux-gnu/libcuda.so.535.309.01", O_RDONLY|O_CLOEXEC) = 3
12    openat(AT_FDCWD, "/usr/share/vulkan/icd.d/nvidia_icd.json", O_RDONLY) = -1 ENOENT (None)
12    openat(AT_FDCWD, "/etc/vulkan/icd.d/nvidia_icd.json", O_RDONLY) = 4
12    openat(AT_FDCWD, "/usr/share/nvidia/nvidia-application-profiles-535.309.01-rc", 0) = 5
12    openat(AT_FDCWD, "/dev/nvidiactl", O_RDWR) = 5
"""
PACKAGE: Final = Package(
    "one", "1.0", "2026-11", ("traced",), ("compute",), opens=("libcuda.so.1", "nvidia_icd.json"),
)  # fmt: skip
ALL: Final = outcome("2", SEARCHED, OPENED)
NONE: Final = outcome("0", "", "")
SEEN: Final = Observed(ALL, ALL, {"compute": NONE})


def test_a_trace_has_the_names_that_were_looked_for_and_the_files_that_were_found() -> None:
    assert ALL.sought == ("libcuda.so.1", "nvidia_icd.json")
    assert ALL.found == {
        "libcuda.so.{v}", "nvidia/nvidia-application-profiles-{v}-rc",
        "vulkan/icd.d/nvidia_icd.json",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("package", "seen", "told"),
    [
        (PACKAGE, SEEN, []),
        (replace(PACKAGE, opens=()), SEEN, ["opens libcuda.so.1, nvidia_icd.json, too"]),
        (replace(PACKAGE, opens=PACKAGE.opens[:1], mentions=PACKAGE.opens[1:]), SEEN, []),
        (
            replace(PACKAGE, how=("names",), opens=(), mentions=PACKAGE.opens),
            SEEN,
            ["opens libcuda.so.1, nvidia_icd.json, too"],
        ),
        (replace(PACKAGE, opens=PACKAGE.opens[::-1]), SEEN, ["opens them in another order"]),
        (
            replace(PACKAGE, opens=(*PACKAGE.opens, "libnvcuvid.so.1", "/dev/nvidiactl")),
            SEEN,
            ["does not open libnvcuvid.so.1"],
        ),
        (PACKAGE, replace(SEEN, with_needs=NONE), ["with compute: '0'; with all: '2'"]),
        (
            PACKAGE,
            replace(SEEN, without={"compute": ALL}),
            ["does not need compute: without it '2', too"],
        ),
        # It exits the same way without a GPU, but did not find a file.
        (PACKAGE, replace(SEEN, without={"compute": replace(NONE, text="2")}), []),
    ],
)
def test_what_differs_from_the_table_is_said(
    package: Package, seen: Observed, told: list[str]
) -> None:
    assert list(differences(package, seen)) == told


def test_a_call_that_another_process_interrupts_in_the_trace_is_read() -> None:
    """As strace 6.1 writes it."""
    trace = """\
9     openat(AT_FDCWD, "/etc/vulkan/icd.d/nvidia_icd.json", O_RDONLY <unfinished ...>
12    openat(AT_FDCWD, "/etc/OpenCL/vendors/nvidia.icd", O_RDONLY <unfinished ...>
9     <... openat resumed>)             = 4
12    <... openat resumed>)             = -1 ENOENT (No such file or directory)
12    exit_group(0 <unfinished ...>
"""
    seen = outcome("", "", trace)
    assert seen.sought == ("nvidia_icd.json", "nvidia.icd")
    assert seen.found == {"vulkan/icd.d/nvidia_icd.json"}


def test_programs_are_of_packages_of_the_table() -> None:
    known = {package.name: package for package in known_packages()}
    assert programs().keys() <= known.keys()
    for name, program in programs().items():
        assert known[name].index == "PyPI"
        compile(program.text, name, "exec")
        assert set(known[name].needs) <= WITHOUT.keys()


def test_a_package_without_a_program_is_named_and_does_not_pass(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--only", "TorchCodec"]) == 1
    assert capsys.readouterr().out == "not run: torchcodec\n"


@dataclass
class StubContainerd:
    """Stands for a containerd whose ``ctr run`` does not end, or ends at once."""

    hangs: bool
    called: list[tuple[str, ...]] = field(default_factory=list)

    def ctr(self, *words: str, **_: Any) -> Completed:
        self.called.append(words[:2])
        if self.hangs and words[0] == "run":
            raise CtrTimeout("ctr run", found="no end within 120 s")
        return Completed(words, 1, "", "ctr: no such runtime\n")


@pytest.mark.parametrize(
    ("hangs", "told", "called"),
    [
        (
            True,
            "no end within 120 s",
            [("run", "--rm"), ("tasks", "delete"), ("containers", "delete")],
        ),
        (False, "ctr: no such runtime", [("run", "--rm")]),
    ],
)
def test_a_package_that_cannot_be_run_is_told_and_the_next_one_is_run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    hangs: bool,
    told: str,
    called: list[tuple[str, ...]],
) -> None:
    """Its container, which still has its directories, does not stay."""
    monkeypatch.setattr(driver_use, "install", lambda *_: None)
    containerd: Any = StubContainerd(hangs)
    assert not driver_use._look(containerd, PACKAGE, Program("", 1), "1.0", str(tmp_path))
    assert "one 1.0: cannot be run: NVSHIM-" in (out := capsys.readouterr().out)
    assert told in out
    assert containerd.called == called
    assert list(tmp_path.iterdir()) == []


def test_newest_version_is_that_for_the_python_of_the_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[list[str]] = []
    answers = ["one (2.0)\nAvailable versions: 2.0, 1.0\n", ""]

    def run(argv: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(argv)
        return subprocess.CompletedProcess(argv, 0, answers[len(asked) - 1], "")

    monkeypatch.setattr(subprocess, "run", run)
    assert [newest_of(PACKAGE), newest_of(PACKAGE)] == ["2.0", ""]
    assert asked[0][asked[0].index("--python-version") + 1] == PYTHON
