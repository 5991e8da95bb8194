"""Finding the processes that use a tree, in procfs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

from integration.containers.tree_users import is_blind
from integration.install.survey import take_survey
from integration.install.usage import Role, User, role_of, users
from integration.install_layout import InstallLayout
from tests.harness.launcher import REPOSITORY
from tests.harness.trees import small_tree

NAME: Final = "containerd-shim-nvidia-v1"
SOCKET: Final = "a1" * 32


@pytest.mark.parametrize(
    ("line", "role"),
    [
        (f"{NAME} -namespace n -id c1 -address /run/c.sock", Role.SHIM),
        (f"/opt/x/runtime/as/{NAME} -namespace n -id c1 start", Role.OTHER),
        (f"/opt/x/bin/{NAME} -id c1 -bundle /b delete", Role.OTHER),
        (f"{NAME} -address /run/c.sock fork-server", Role.FORK_SERVER),
        (f"{NAME} -address /run/c.sock -spare fork-server", Role.SPARE),
        (f"/opt/x/bin/{NAME}.py -address a -socket s fork-server", Role.FORK_SERVER),
        (f"vim {NAME}", Role.OTHER),
        ("", Role.OTHER),
    ],
)
def test_what_a_process_does_is_told_by_its_words(line: str, role: Role) -> None:
    assert role_of(line.split()) is role


@contextmanager
def _running(*argv: str) -> Iterator[int]:
    with subprocess.Popen(argv) as process:
        try:
            while os.readlink(f"/proc/{process.pid}/exe") == os.readlink("/proc/self/exe"):
                pass  # it has not executed its program yet
            yield process.pid
        finally:
            process.kill()


def test_a_process_that_executes_a_file_uses_its_tree_whatever_the_tree_is_called_now(
    tmp_path: Path,
) -> None:
    tree, other = str(tmp_path / "a"), str(tmp_path / "b")
    small_tree(tree)
    small_tree(other)
    assert users([tree, other]) == []
    with _running(f"{tree}/runtime/lib/sleep", "100") as pid:
        assert users([tree, other]) == [User(pid, Role.OTHER, tree)]
        os.rename(tree, f"{tree}-aside")
        assert users([f"{tree}-aside"]) == [User(pid, Role.OTHER, f"{tree}-aside")]
    assert users([f"{tree}-aside"]) == []


def _process(proc: Path, pid: int, line: str, maps: str = "", *, uid: int = 0) -> Path:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in line.split()))
    (folder / "maps").write_text(maps)
    (folder / "status").write_text(f"Name:\tx\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
    return folder


def test_a_shim_that_maps_a_library_names_the_program_that_containerd_asks_for(
    tmp_path: Path,
) -> None:
    small_tree(str(tmp_path / "a"))
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "shim-binary-path").write_text(f"/usr/local/bin/{NAME}")
    library = f"{tmp_path}/a/lib/x.so"
    maps = (
        f"7f00-7f01 r-xp 00000000 08:01 99 {library} (deleted)\n7f02-7f03 rw-p 00000000 00:00 0 \n"
    )
    folder = _process(tmp_path / "proc", 5, f"{NAME} -namespace n -id c1 -address a", maps)
    (folder / "cwd").symlink_to(bundle)
    _process(tmp_path / "proc", 6, f"{NAME} -namespace n -id c2 -address a")
    # Any user may map a file of a tree, and choose any command line.
    _process(tmp_path / "proc", 7, f"{NAME} -namespace n -id c3 -address a", maps, uid=1000)
    assert users([f"{tmp_path}/a"], proc=str(tmp_path / "proc")) == [
        User(5, Role.SHIM, f"{tmp_path}/a", f"/usr/local/bin/{NAME}"),
        User(7, Role.OTHER, f"{tmp_path}/a"),
    ]


def test_a_process_that_ends_while_it_is_looked_at_uses_nothing(tmp_path: Path) -> None:
    small_tree(f"{tmp_path}/a")
    maps = f"7f00-7f01 r-xp 00000000 08:01 99 {tmp_path}/a/lib/x.so\n"
    for pid in (5, 6, 7):
        _process(tmp_path / "proc", pid, f"{NAME} fork-server", maps)
    (tmp_path / "proc/5/status").unlink()
    fields = f"Z {' '.join('0' for _ in range(16))} 1 {' '.join('0' for _ in range(32))}"
    (tmp_path / "proc/6/stat").write_text(f"6 (x) {fields}")
    found = users([f"{tmp_path}/a"], proc=str(tmp_path / "proc"))
    assert [user.pid for user in found] == [7]


def test_a_file_under_the_path_of_a_tree_in_a_container_is_none_of_the_tree(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    tree = str(tmp_path / "a")
    small_tree(tree)
    script = 'mount -t tmpfs tmpfs "$0" && cp /bin/busybox "$0/sleep" && exec "$0/sleep" 100'
    with subprocess.Popen(["unshare", "--mount", "sh", "-c", script, tree]) as process:
        try:
            while not os.readlink(f"/proc/{process.pid}/exe").endswith("/sleep"):
                assert process.poll() is None
            assert os.readlink(f"/proc/{process.pid}/exe") == f"{tree}/sleep"
            assert users([tree]) == []
        finally:
            process.kill()


def test_a_mapped_file_is_known_by_its_inode_where_its_path_is_another(tmp_path: Path) -> None:
    tree = f"{tmp_path}/a"
    small_tree(tree)
    seen = os.stat(f"{tree}/runtime/lib/program")
    device = f"{os.major(seen.st_dev):02x}:{os.minor(seen.st_dev):02x}"
    maps = f"7f00-7f01 r-xp 00000000 {device} {seen.st_ino} /elsewhere/lib\n"
    _process(tmp_path / "proc", 5, "x", maps)
    assert [user.pid for user in users([tree], proc=str(tmp_path / "proc"))] == [5]


def test_listeners_of_this_pid_namespace_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the full path would be too long for a socket
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(SOCKET)
        listener.listen()
        (tmp_path / ("b2" * 32)).write_text("")
        assert not is_blind(".")


def test_a_listener_of_another_pid_namespace_is_known_to_be_unseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    monkeypatch.chdir(tmp_path)
    # From inside: the listener is this process, which is outside of the new namespace.
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(SOCKET)
        listener.listen()
        ask = "from integration.containers.tree_users import is_blind; print(is_blind('.'))"
        done = subprocess.run(
            ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", ask],
            capture_output=True, text=True, check=True, env={"PYTHONPATH": REPOSITORY},
        )  # fmt: skip
    assert done.stdout == "True\n"


def test_a_listener_that_is_too_busy_to_be_known_may_be_unseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(SOCKET)
        listener.listen(0)
        with suppress(BlockingIOError):
            while True:  # until its queue is full
                client = stack.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect(SOCKET)
        assert is_blind(".")


@pytest.mark.parametrize(
    ("capabilities", "blind"), [("-dac_override,-dac_read_search", True), ("+chown", False)]
)
def test_who_may_not_look_into_the_directory_of_sockets_is_blind(
    capabilities: str, blind: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"s/{SOCKET}")
        listener.listen()
        # With containerd's mode: root needs a capability to enter it.
        (tmp_path / "s").chmod(0o600)
        assert _asked("is_blind('s')", capabilities) is blind


@pytest.mark.parametrize(
    ("name", "capabilities", "blind"),
    [(NAME, "-sys_ptrace", True), (NAME, "+chown", False), ("sh", "-sys_ptrace", False)],
)
def test_a_shim_whose_files_are_not_to_be_seen_makes_blind(
    name: str, capabilities: str, blind: bool, tmp_path: Path
) -> None:
    with subprocess.Popen([name, "60"], executable="/bin/sleep") as process:
        (tmp_path / "proc").mkdir()
        os.symlink(f"/proc/{process.pid}", tmp_path / "proc" / str(process.pid))
        asked = _asked(f"is_blind('none', proc='{tmp_path}/proc')", capabilities)
        process.kill()
    assert asked is blind


def _asked(question: str, capabilities: str) -> bool:
    """Query with fewer of root's capabilities."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    ask = f"from integration.containers.tree_users import is_blind; print({question})"
    done = subprocess.run(
        ["setpriv", f"--bounding-set={capabilities}", sys.executable, "-c", ask],
        capture_output=True, text=True, check=True, env={"PYTHONPATH": REPOSITORY},
    )  # fmt: skip
    return done.stdout == "True\n"


def test_links_are_looked_for_where_they_usually_are(tmp_path: Path) -> None:
    prefix, *usual = (str(tmp_path / name) for name in ("opt", "one", "two"))
    assert InstallLayout.of(prefix, None, usual=usual) == InstallLayout(prefix, usual[0])
    for directory, to in zip(usual, ("/elsewhere", prefix), strict=True):
        os.mkdir(directory)
        os.symlink(f"{to}/current/bin/nvshim", f"{directory}/nvshim")
    assert InstallLayout.of(prefix, None, usual=usual) == InstallLayout(prefix, usual[1])
    # With another directory, or none, the links that are there are still known.
    further = (f"{usual[1]}/nvshim",)
    for bindir in (usual[0], ""):
        found = InstallLayout.of(prefix, bindir, usual=usual)
        assert found == InstallLayout(prefix, bindir, further)


def test_what_nobody_knows_below_the_prefix_is_no_tree(tmp_path: Path) -> None:
    small_tree(str(tmp_path / "1.0-00000000"))
    (tmp_path / "notes").write_text("mine")
    (tmp_path / ".incoming-0123abcd").mkdir()
    (tmp_path / ".self-test-").mkdir()
    os.symlink("1.0-00000000", tmp_path / "current")
    os.symlink("/etc", tmp_path / "previous")
    survey = take_survey(InstallLayout(str(tmp_path), ""))
    assert [each.name for each in survey.installed] == ["1.0-00000000"]
    assert (survey.current, survey.previous) == ("1.0-00000000", "")
    assert survey.foreign == (".self-test-", "notes")
    assert survey.leftovers == (f"{tmp_path}/.incoming-0123abcd",)
