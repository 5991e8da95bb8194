from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from integration.containers.bundles import Container, Pod, find_containers
from integration.containers.procfs import Procfs
from integration.containers.shims import FORK_SERVER, SHIM, ShimProcess, find_shims, states_of
from integration.containers.trees import Tree, is_current, tree_of
from integration.inspection.shim_list import held_names, shim_row
from tests.harness.waiting import eventually

PROGRAM = "containerd-shim-nvidia-v1"
LISTEN = """if True:
    import os, socket, sys
    os.chdir(sys.argv[1])
    listener = socket.socket(socket.AF_UNIX)
    if sys.argv[2]:
        listener.bind(sys.argv[2])
        listener.listen()
    lock = os.open(sys.argv[3], os.O_RDWR | os.O_CREAT, 0o600) if sys.argv[3] else -1
    # Like a shim, which overwrites the command line of a verb.
    words = sys.argv[4:]
    os.set_inheritable(listener.fileno(), True)
    if lock >= 0:
        os.set_inheritable(lock, True)
    os.execv("/bin/sleep", words) if words[0] == "sleep" else None
    os.execv(sys.executable, [*words[:1], "-c", "import mmap, os, time;"
             " fd = os.open(os.environ.get('MAPPED', '/proc/self/exe'), os.O_RDONLY);"
             " mapped = mmap.mmap(fd, 1, prot=mmap.PROT_READ);"
             " print(1, flush=True); time.sleep(100)", *words[1:]])
"""


@contextmanager
def process(
    directory: str, *words: str, socket: str = "", lock: str = "", within: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process with any command line and working directory, listening on a socket."""
    with subprocess.Popen(
        [*within, sys.executable, "-c", LISTEN, directory, socket, lock, *words],
        stdout=subprocess.PIPE,
    ) as started:
        try:
            assert started.stdout is not None
            started.stdout.readline()
            yield started
        finally:
            started.kill()


@pytest.fixture
def place() -> Iterator[str]:
    """Make a directory with a short path: those of sockets are limited to 107 bytes."""
    path = f"/tmp/nvshim-inspect-{os.getpid()}"
    os.mkdir(path, 0o700)
    yield path
    shutil.rmtree(path)


def found(pid: int) -> ShimProcess | None:
    return next((each for each in find_shims() if each.pid == pid), None)


def shim_words(name: str = "web") -> list[str]:
    return [PROGRAM, "-namespace", "k8s.io", "-id", name, "-address", "/run/c.sock"]


def test_a_shim_is_known_by_its_bundle_and_its_socket(
    make_bundle: Callable[..., str], place: str
) -> None:
    socket = f"{place}/s"
    annotations = {
        "io.kubernetes.cri.sandbox-id": "web",
        "io.kubernetes.cri.sandbox-name": "pod",
        "io.kubernetes.cri.sandbox-namespace": "team",
    }
    bundle = make_bundle("web", annotations=annotations, address=f"unix://{socket}")
    with process(bundle, *shim_words(), socket=socket) as started:
        one = found(started.pid)
        assert one is not None
        assert (one.kind, one.namespace, one.group) == (SHIM, "k8s.io", "web")
        assert (one.address, one.bundle, one.socket) == ("/run/c.sock", bundle, socket)
        assert one.memory is not None
        assert one.memory[0] >= one.memory[1] > 0
        assert one.warm is None
        assert not one.is_abroad
        assert states_of([one]) == [bundle.partition("/io.containerd")[0]]


@pytest.mark.parametrize(
    "lie",
    ["other directory", "no bundle", "no socket", "other socket", "writable", "other program"],
)
def test_who_only_says_so_is_no_shim(
    make_bundle: Callable[..., str], tmp_path: Path, place: str, lie: str
) -> None:
    socket = f"{place}/s"
    bundle = directory = make_bundle("web", address=f"unix://{socket}")
    words, listens = shim_words(), socket
    if lie == "other directory":
        directory = str(tmp_path)
    elif lie == "no bundle":
        directory = str(tmp_path / "io.containerd.runtime.v2.task/k8s.io/web")
        os.makedirs(directory)
    elif lie == "no socket":
        listens = ""
    elif lie == "other socket":
        listens = f"{place}/t"
    elif lie == "writable":
        os.chmod(bundle, 0o777)
    else:
        words = ["containerd-shim-runc-v2", *words[1:]]
    with process(directory, *words, socket=listens) as started:
        assert found(started.pid) is None


def test_a_fork_server_is_known_by_its_lock_and_its_socket(place: str) -> None:
    socket = f"{place}/f0"
    words = [PROGRAM, "-address", "/run/c.sock", "fork-server"]
    with process("/", *words, socket=socket, lock=f"{socket}.lock") as started:
        one = found(started.pid)
        assert one is not None
        assert (one.kind, one.socket, one.bundle) == (FORK_SERVER, socket, "")
        os.unlink(f"{socket}.lock")
        with open(f"{socket}.lock", "w"):
            assert found(started.pid) is None  # another file with that name
    for lock, mode in (("", 0o700), (f"{socket}.lock", 0o777)):
        os.unlink(socket)
        os.chmod(place, mode)
        with process("/", *words, socket=socket, lock=lock) as started:
            assert found(started.pid) is None


def test_a_spare_is_nobody_that_no_fork_server_has_forked() -> None:
    with process("/", PROGRAM, "-address", "/run/c.sock", "-spare", "fork-server") as started:
        assert found(started.pid) is None


def test_a_process_that_has_ended_is_not_there() -> None:
    with subprocess.Popen(["true"]) as ended:
        eventually(lambda: Procfs().status(ended.pid).is_zombie, "it has ended")  # type: ignore[union-attr]
        procfs = Procfs()
        assert procfs.memory(ended.pid) is None
        assert procfs.words(ended.pid) == []
        assert procfs.mapped(ended.pid) == []
    assert procfs.status(ended.pid) is None
    assert procfs.owner(ended.pid) is None
    assert procfs.descriptors(ended.pid) == {}
    assert procfs.listening(ended.pid) == set()
    assert procfs.link(ended.pid, "cwd") == ""
    assert procfs.open_file(ended.pid, "0") is None


class _Mapped(Procfs):
    def __init__(self, *paths: str) -> None:
        super().__init__()
        self._paths = list(paths)

    def mapped(self, pid: int) -> list[str]:
        return self._paths


def test_a_tree_is_what_is_mapped_of_it(tmp_path: Path) -> None:
    for name, version in (("1.2.3-aaaaaaaa", "1.2.3"), ("1.3.0-bbbbbbbb", "1.3.0")):
        for package in ("shim", "google/_upb"):
            (tmp_path / name / "lib" / package).mkdir(parents=True)
        (tmp_path / name / "lib/shim/__init__.py").write_text(f'# of it\nVERSION = "{version}"\n')
    (tmp_path / "current").symlink_to("1.3.0-bbbbbbbb")

    def of(name: str, end: str = "") -> Tree | None:
        path = f"{tmp_path}/{name}/lib/google/_upb/_message.abi3.so{end}"
        return tree_of(_Mapped("/usr/lib/libc.so.6", path), 1)

    old, new = of("1.2.3-aaaaaaaa"), of("1.3.0-bbbbbbbb")
    assert old == Tree(f"{tmp_path}/1.2.3-aaaaaaaa", "1.2.3", is_there=True)
    assert new is not None
    assert (is_current(old), is_current(new)) == (False, True)
    gone = of("1.2.3-aaaaaaaa", " (deleted)")
    assert gone == Tree(f"{tmp_path}/1.2.3-aaaaaaaa", "1.2.3", is_there=False)
    assert is_current(gone) is False
    assert of("no-version", " (deleted)") == Tree(f"{tmp_path}/no-version", "", is_there=False)
    (tmp_path / "current").unlink()
    assert is_current(new) is None
    assert tree_of(_Mapped("/usr/lib/libc.so.6"), 1) is None


def test_a_row_has_the_containers_of_its_pod_and_no_other() -> None:
    def container(name: str, address: str, **more: Any) -> Container:
        fields = {
            "namespace": "k8s.io", "bundle": f"/s/tasks/k8s.io/{name}", "name": name,
            "pod": Pod("team", "web"), "group": "g", "sandbox": False, "pid": 7, **more,
        }  # fmt: skip
        return Container(name, address=address, **fields)

    gpu = {"grant": {"gpus": [{"uuid": "GPU-1"}], "mig_devices": [{"uuid": "MIG-2"}]}}
    containers = [
        container("g", "/s/g", sandbox=True),
        container("one", "/s/g", record=gpu),
        container("two", "", record={"vendors": [{"vendor": "AMD", "granted": ["AMD GPU 0"]}]}),
        container("elsewhere", "/s/h", record=gpu),
        container("namesake", "/s/g", namespace="moby", record=gpu),
    ]
    left = shim_row(ShimProcess(4, SHIM, 0, "/c", namespace="k8s.io", group="g"), containers)
    assert (left["bundle"], left["containers"], left["id"]) == (None, [], "g")
    shim = ShimProcess(
        5, SHIM, 0, "/c", namespace="k8s.io", group="g", socket="/s/g", bundle="/s/tasks/k8s.io/g"
    )
    row = shim_row(shim, containers)
    assert [each["id"] for each in row["containers"]] == ["one", "two"]
    assert row["pod"] == {"namespace": "team", "name": "web"}
    assert row["gpus"] == ["GPU-1", "MIG-2", "AMD GPU 0"]
    assert (row["version"], row["memory"], row["current"]) == (None, None, None)
    server = shim_row(ShimProcess(6, FORK_SERVER, 0, "/c"), containers)
    assert (server["containers"], server["pod"], server["id"]) == ([], None, None)


def test_a_sandbox_that_a_shim_holds_has_no_spec(
    make_bundle: Callable[..., str], place: str
) -> None:
    bundle = make_bundle("held", address=f"unix://{place}/s")
    os.unlink(f"{bundle}/config.json")
    with process(bundle, *shim_words("held"), socket=f"{place}/s") as started:
        one = found(started.pid)
        assert one is not None
        assert (one.group, one.socket) == ("held", f"{place}/s")


@pytest.mark.parametrize("ours", [True, False])
def test_a_shim_that_has_outlived_its_bundle_is_told(
    make_bundle: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    bundle = make_bundle("left", address="unix:///nonexistent")
    (tmp_path / "1.0.0/shim").mkdir(parents=True)
    (tmp_path / "1.0.0/shim/__init__.py").write_text('VERSION = "1.0.0"\n')
    library = tmp_path / "1.0.0" / ("google/_upb" if ours else "other") / "_message.so"
    library.parent.mkdir(parents=True)
    library.write_text("mapped")
    monkeypatch.setenv("MAPPED", str(library))
    with process(bundle, *shim_words("left")) as started:
        assert found(started.pid) is None
        shutil.rmtree(bundle)
        one = found(started.pid)
        if ours and os.geteuid() == 0:
            assert one is not None
            assert (one.namespace, one.group, one.bundle) == ("k8s.io", "left", "")
        else:
            assert one is None


def test_nobody_but_root_says_where_containers_are(tmp_path: Path) -> None:
    bundle = str(tmp_path / "io.containerd.runtime.v2.task/k8s.io/web")
    shims = [ShimProcess(uid, SHIM, uid, "/c", bundle=bundle) for uid in (0, os.geteuid() + 1)]
    assert states_of(shims[:1]) == [str(tmp_path)]
    assert states_of(shims[1:]) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a pid namespace")
def test_a_container_that_looks_like_a_shim_tells_of_no_containers(
    make_bundle: Callable[..., str], place: str
) -> None:
    socket = f"{place}/s"
    bundle = make_bundle("web", address=f"unix://{socket}")
    within = ("unshare", "--pid", "--fork", "--kill-child")
    with process(bundle, *shim_words(), socket=socket, within=within):
        (one,) = [each for each in find_shims() if each.bundle == bundle]
        assert one.is_abroad
        assert states_of([one]) == []


def test_what_a_container_holds_has_names() -> None:
    assert held_names(None) == []
    assert held_names({"grant": None, "vendors": None}) == []
    assert held_names({"grant": {"gpus": [{"uuid": "", "bus_id": "0000:01:00.0"}]}}) == [
        "0000:01:00.0"
    ]


@pytest.mark.parametrize(
    "record",
    [
        {"grant": 5, "vendors": 3},
        {"grant": {"gpus": 5, "mig_devices": "x"}},
        {"grant": {"gpus": [5, {"uuid": [1]}, {}]}},
        {"vendors": [5, {"granted": 7}, {"granted": [{}]}]},
    ],
)
def test_a_record_of_another_shape_holds_nothing(record: dict[str, Any]) -> None:
    assert held_names(record) == []


MANY: Final = """if True:
    import os, socket, sys
    listeners = []
    for number in range(int(sys.argv[1])):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{sys.argv[2]}/{number}")
        listener.listen(1)
        listeners.append(listener)
    print("listens", flush=True)
    sys.stdin.read()
"""


class _Counted(dict[str, str]):
    """A table that counts the entries that are read."""

    seen = 0

    def items(self) -> Any:
        for item in super().items():
            _Counted.seen += 1
            yield item

    def values(self) -> Any:
        for value in super().values():
            _Counted.seen += 1
            yield value


@pytest.mark.parametrize("sockets", [10, 200])
def test_each_descriptor_of_a_process_is_looked_at_a_fixed_number_of_times(
    monkeypatch: pytest.MonkeyPatch, place: str, sockets: int
) -> None:
    """A process that pretends to be a fork server can listen on any number of sockets."""
    descriptors, text = Procfs.descriptors, Procfs.text
    read: list[str] = []

    def counted(procfs: Procfs, pid: int) -> dict[str, str]:
        return _Counted(descriptors(procfs, pid))

    def noted(procfs: Procfs, pid: int | str, name: str) -> str:
        read.append(name)
        return text(procfs, pid, name)

    argv = [PROGRAM, "-c", MANY, str(sockets), place, "fork-server"]
    with subprocess.Popen(
        argv, executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"listens\n"
            monkeypatch.setattr(Procfs, "descriptors", counted)
            monkeypatch.setattr(Procfs, "text", noted)
            monkeypatch.setattr(Procfs, "pids", lambda _: iter([process.pid]))
            _Counted.seen = 0
            assert find_shims() == []
            assert sockets < _Counted.seen <= 4 * (sockets + 10)
            assert read.count("net/unix") <= 1
        finally:
            process.kill()


def test_sockets_are_read_once_for_all_containers(
    make_bundle: Callable[..., str], place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read: list[str] = []
    text = Procfs.text

    def noted(procfs: Procfs, pid: int | str, name: str) -> str:
        read.append(name)
        return text(procfs, pid, name)

    monkeypatch.setattr(Procfs, "text", noted)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{place}/s")
        listener.listen()
        with subprocess.Popen(["sleep", "1000"]) as init:
            try:
                # For example, a runtime whose cgroups are not named after containers.
                for number in range(20):
                    make_bundle(f"c{number}", address=f"unix://{place}/s", init_pid=str(init.pid))
                found = find_containers([str(tmp_path / "state")])
            finally:
                init.kill()
    assert [container.pid for container in found] == [init.pid] * 20
    assert read.count("net/unix") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="makes namespaces")
def test_of_a_process_in_a_container_nothing_is_read_but_whose_it_is(
    make_bundle: Callable[..., str], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket = f"{place}/s"
    bundle = make_bundle("web", address=f"unix://{socket}")
    within = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
    read: list[str] = []
    text = Procfs.text
    with process(bundle, *shim_words(), socket=socket, within=within) as unshare:
        children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text("ascii")
        (pid,) = map(int, children.split())

        def noted(procfs: Procfs, of: int | str, name: str) -> str:
            if of == pid:
                read.append(name)
            return text(procfs, of, name)

        monkeypatch.setattr(Procfs, "text", noted)
        assert not [each for each in find_shims() if each.bundle == bundle]
    assert set(read) == {"stat", "status"}
