"""Machines unlike this one: each circumstance exists inside, and nowhere else."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.anywhere import __main__ as anywhere
from tests.anywhere import circumstances, clock, root, wrappers
from tests.anywhere.circumstances import CIRCUMSTANCES, together
from tests.harness.launcher import REPOSITORY

ROWS = {row.name: row for row in CIRCUMSTANCES}


@pytest.fixture(scope="module", autouse=True)
def _is_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, as the namespaces do")


def inside(name: str, directory: Path, *argv: str) -> str:
    """Return the output of a program in a circumstance."""
    words = [*ROWS[name].wrapper(str(directory)), *argv]
    return subprocess.run(
        words,
        capture_output=True,
        check=True,
        text=True,
        errors="surrogateescape",
    ).stdout.strip()


def test_each_has_a_name_of_its_own_and_says_why_it_runs_a_part() -> None:
    assert len(ROWS) == len(CIRCUMSTANCES)
    for row in CIRCUMSTANCES:
        assert bool(row.tests) == bool(row.why), row.name
        for path in row.tests:
            assert os.path.exists(os.path.join(REPOSITORY, path)), path


@pytest.mark.skipif(not os.path.exists(wrappers.TIME_NAMESPACE), reason="no time namespaces")
@pytest.mark.parametrize(("name", "seconds"), [("boot", 60), ("uptime", 400 * 86_400)])
def test_uptime_is_what_it_says_also_in_another_time_namespace(
    tmp_path: Path, name: str, seconds: int
) -> None:
    clocks = "import time; print(time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME))"
    told = inside(name, tmp_path, "python3", "-c", f"print(open('/proc/uptime').read()); {clocks}")
    uptime, _, monotonic, boottime = map(float, told.split())
    for each in (uptime, monotonic, boottime):
        assert 0 <= each - seconds < 60
    with open("/proc/uptime", encoding="ascii") as file:
        before = float(file.read().split()[0])
    # A namespace's offsets are relative to the initial one, not to the current one.
    script = "from tests.anywhere import wrappers as w; import os; a = w.uptime('', 5000);"
    script += " os.execvp(a[0], [*a, 'cat', '/proc/uptime'])"
    nested = inside(name, tmp_path, "python3", "-c", script)
    assert 0 <= float(nested.split()[0]) - 5000 < 60
    with open("/proc/uptime", encoding="ascii") as file:
        assert float(file.read().split()[0]) >= before


def test_names_and_mounts_are_seen_inside_alone(tmp_path: Path) -> None:
    assert len(inside("hostname", tmp_path, "uname", "-n")) == 63
    for name, kind in (("tmpfs", "tmpfs"), ("overlay", "overlayfs")):
        script = 'cd "$TMPDIR" && stat --file-system --format %T . && findmnt -fno PROPAGATION -T .'
        script += f" && echo $TMPDIR && echo x >{tmp_path.name}.seen-inside"
        found = inside(name, tmp_path, "sh", "-c", script).splitlines()
        # Mounts of a pod's volumes are shared, like those of the host under systemd.
        assert found == [kind, "shared", "/tmp"]
        assert not os.path.exists(f"/tmp/{tmp_path.name}.seen-inside")
    assert len(inside("long-tmpdir", tmp_path, "sh", "-c", 'echo "$TMPDIR"')) == 90


def test_a_stuck_mount_is_there_as_long_as_the_command_runs(tmp_path: Path) -> None:
    mounts = inside("stuck-mount", tmp_path, "cat", "/proc/self/mountinfo")
    assert re.search(f" {tmp_path}/below/stuck .* - fuse", mounts)
    assert list((tmp_path / "below/stuck").iterdir()) == []


def test_odd_names_are_there_as_long_as_the_command_runs(tmp_path: Path) -> None:
    script = "cd /proc && cat self/mountinfo; cat [0-9]*/comm [0-9]*/cmdline; true"
    look = ["sh", "-c", script]
    seen = inside("odd-names", tmp_path, *look)
    assert f" {tmp_path}/below/a\udcff\\011\\040b) " in seen
    assert "\na\udcff\t b)\n" in seen
    name = os.fsencode(f"{tmp_path}/below/a")
    assert name not in subprocess.check_output(look, stderr=subprocess.DEVNULL)


def test_limits_and_variables_are_as_they_are_called(tmp_path: Path) -> None:
    assert inside("no-home", tmp_path, "sh", "-c", "echo ${HOME-unset}") == "unset"
    assert inside("one-cpu", tmp_path, "nproc") == "1"
    assert inside("nofile", tmp_path, "sh", "-c", "ulimit -Sn") == "1024"
    at = ["date", "--date=@1704067200", "+%F %R"]  # New Year's midnight, in UTC
    assert inside("timezone", tmp_path, *at) == "2024-01-01 13:45"


def test_a_host_runs_make_and_a_guest_pytest_with_the_paths_that_are_asked_for() -> None:
    whole = ROWS["no-home"].command("/d")
    assert whole[-3:] == ["demo", "test", "TESTS="]
    assert ROWS["no-home"].command("/d", ("a", "b"))[-1] == "TESTS=a b"
    guest = ROWS["leap"].command("/d", ("a", "b"))
    assert guest[guest.index("pytest") - 2 :][:3] == ["python3", "-m", "pytest"]
    assert guest[-2:] == ["a", "b"]


def test_clock_of_a_machine_that_is_no_guest_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NVSHIM_TEST_VM", raising=False)
    monkeypatch.setattr("sys.argv", ["clock", "day-behind", "true"])
    monkeypatch.setattr("time.clock_settime", lambda *_: pytest.fail("was set"))
    with pytest.raises(SystemExit, match="2"):
        clock.main()


def test_files_that_a_configuration_names_are_found_and_addresses_are_not() -> None:
    text = """\
[global]
cert = /etc/ssl/own.crt
find-links = /opt/wheels
extra-index-url = file:///opt/index/simple https://mirror.example/simple/
Acquire::https::CaInfo "/etc/apt/ca.pem";
Signed-By: /usr/share/keyrings/a.gpg
"""
    assert root.paths_in(text) == [
        "/etc/ssl/own.crt", "/opt/wheels", "/opt/index/simple", "/etc/apt/ca.pem",
        "/usr/share/keyrings/a.gpg",
    ]  # fmt: skip


def test_what_the_readme_names_is_what_a_bare_root_has() -> None:
    with open(os.path.join(REPOSITORY, "README.md"), encoding="utf-8") as file:
        match = re.search(r"as root, with (.*):\n\n```sh\nmake demo\nmake test\n```", file.read())
    assert match is not None
    assert sorted(re.findall(r"\w+", match[1].replace("and", ""))) == sorted(root.NAMED)


def test_what_pytest_counted_is_added_up() -> None:
    lines = [
        "===== 3 failed, 8372 passed, 5 skipped, 1 error in 508.10s (0:08:28) =====",
        "1 passed in 0.10s",
        "12 passed, as a test prints it",
    ]
    assert anywhere.count([*lines, ""]) == {"failed": 3, "passed": 8373, "skipped": 5, "error": 1}


def test_a_run_without_a_test_that_passed_has_failed() -> None:
    good = anywhere.Result("boot", "c", "", passed=1, failed=0, skipped=0, code=0, seconds=1.0)
    assert good.is_good
    for bad in (replace(good, passed=0), replace(good, failed=1), replace(good, code=2)):
        assert not bad.is_good
    assert anywhere.is_done(good, "c")
    for other in (
        replace(good, code=1),
        replace(good, asked="tests/unit"),
        replace(good, commit=""),
    ):
        assert not anywhere.is_done(other, other.commit)
    assert not anywhere.is_done(good, "d")


def test_several_circumstances_hold_at_once(tmp_path: Path) -> None:
    joined = together("hostname+no-home+nofile")
    script = "uname -n; echo ${HOME-unset}; ulimit -Sn"
    words = [*joined.wrapper(str(tmp_path)), "sh", "-c", script]
    seen = subprocess.run(words, capture_output=True, check=True, text=True).stdout.split()
    assert (len(seen[0]), *seen[1:]) == (63, "unset", "1024")
    for name in ("bare-12", "leap"):
        with pytest.raises(ValueError, match=f"^{name}: cannot be joined"):
            together(f"hostname+{name}")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the directory in which the runner keeps results."""
    monkeypatch.setattr(anywhere, "KEPT", str(tmp_path))
    monkeypatch.setattr(anywhere, "_RESULTS", str(tmp_path / "results.json"))
    monkeypatch.setattr(anywhere, "_commit", lambda: "c0ffee")
    return tmp_path


def test_what_passed_at_this_commit_is_not_run_again_unless_it_is_named(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def show(argv: list[str], log: object, lines: list[str]) -> int:
        ran.append(argv[0])
        lines.append("2 passed in 1.00s" if argv[0] != "bad" else "1 failed, 1 passed in 1.00s")
        return int(argv[0] == "bad")

    rows = (
        replace(ROWS["no-home"], name="good", wrapper=lambda _: ["good"]),
        replace(ROWS["no-home"], name="bad", wrapper=lambda _: ["bad"]),
    )
    for module in (anywhere, circumstances):
        monkeypatch.setattr(module, "CIRCUMSTANCES", rows)
    monkeypatch.setattr(anywhere, "_show", show)
    assert anywhere.main([]) == 1
    assert anywhere.main([]) == 1
    assert ran == ["good", "bad", "bad"]
    assert anywhere.main(["--only", "good"]) == 0
    assert ran[-1] == "good"
    rows_of = [line.split()[:4] for line in capsys.readouterr().out.splitlines()]
    assert ["bad", "1", "1", "0"] in rows_of
    assert anywhere.main(["--only", "good+good"]) == 0
    for wrong in ("nothing", "good+nothing"):
        with pytest.raises(SystemExit):
            anywhere.main(["--only", wrong])


def test_what_the_machines_python_runs_needs_nothing_of_its_packages() -> None:
    with open(os.path.join(REPOSITORY, "Makefile"), encoding="utf-8") as file:
        words = re.findall(
            r"(?m)^\t@?\$\(PYTHON\) -(?:m (\S+)|c 'from (\S+) import (\w+))", file.read()
        )
    programs = {
        f"import {module}" if module else f"from {room} import {name}"
        for module, room, name in words
    }
    assert len(programs) >= 4
    script = "; ".join(sorted(programs))
    # Without Debian's packages of Python modules, which differ between machines.
    subprocess.run(["/usr/bin/python3", "-S", "-c", script], cwd=REPOSITORY, check=True)


def test_a_mark_of_packages_is_out_of_date_once_one_was_removed(tmp_path: Path) -> None:
    (tmp_path / ".packages").touch()

    def is_up_to_date(packages: str) -> bool:
        words = ["make", "-q", f"CACHE={tmp_path}", f"PACKAGES={packages}", f"{tmp_path}/.packages"]
        return subprocess.run(words, cwd=REPOSITORY, check=False).returncode == 0

    assert is_up_to_date("coreutils dpkg")
    assert not is_up_to_date("coreutils dpkg no-such-package")
