"""The holders of devices that are out of service, and how messages name them."""

from __future__ import annotations

import fcntl
import json
import math
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from hooks.node.inventory import load_inventory
from integration.containers.bundles import TASKS, Container, find_containers
from integration.containers.procfs import Procfs
from integration.devices.targets import THE_DRIVER, targets_of
from integration.drain import holders, serving, waiting
from integration.drain.holders import AGENT, CONTAINER, MPS, Holder, find_holders
from integration.drain.serving import DrainOptions, wait_for_holders
from integration.drain.waiting import Force, blocking, not_by_themselves
from tests.unit.hooks.fake_node import Node, nvml_gpu, nvml_mig, uuid_of

if TYPE_CHECKING:
    from collections.abc import Iterator

PROC: Final = "shown"


class Place:
    """A node with a whole GPU and one with two MIG devices, with processes and bundles."""

    def __init__(self, node: Node, sockets: ExitStack) -> None:
        self.node, self._sockets = node, sockets
        self.proc = node.base / PROC
        self.proc.mkdir()
        self.state = node.base / "containerd"

    def process(self, pid: int, name: str, *nodes: str, parent: int = 1, cgroup: str = "/") -> None:
        """Start a process that has device nodes open."""
        here = self.proc / str(pid)
        (here / "fd").mkdir(parents=True)
        for number, path in enumerate(nodes):
            (here / "fd" / str(number)).symlink_to(path)
        (here / "comm").write_text(f"{name}\n")
        (here / "stat").write_text(f"{pid} ({name}) S {parent} " + "0 " * 40)
        (here / "cgroup").write_text(f"0::{cgroup}\n")

    def bundle(self, name: str, *gpus: int, listens: bool = True, pid: int = 0) -> Path:
        """Make the bundle of a container that has GPUs."""
        bundle = self.state / TASKS / "k8s.io" / name
        bundle.mkdir(parents=True)
        (bundle / "config.json").write_text('{"process": {"env": []}}')
        granted = [{"index": gpu, "uuid": uuid_of(gpu)} for gpu in gpus]
        record = {"grant": {"gpus": granted, "mig_devices": [], "capabilities": []}}
        (bundle / "nvidia.json").write_text(json.dumps(record))
        path = str(self.node.base / f"{name}.sock")
        (bundle / "address").write_text(f"unix://{path}")
        listener = self._sockets.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        if listens:
            listener.listen()
        if pid:
            self.begin(bundle, pid)
        return bundle

    def begin(self, bundle: Path, pid: int) -> None:
        self.process(pid, "main", cgroup=f"/pods/{bundle.name}")
        (bundle / "init.pid").write_text(str(pid))

    def found(self, *names: str, **more: Any) -> list[Holder]:
        inventory = load_inventory(self.node.config)
        assert inventory is not None
        targets = targets_of(names, inventory) if names else (THE_DRIVER,)
        config = replace(self.node.config, **more)
        return list(find_holders(targets, inventory, config, [str(self.state)], str(self.proc)))

    def kinds(self, *names: str) -> set[tuple[str, str, tuple[str, ...]]]:
        return {(each.kind, each.name, each.devices) for each in self.found(*names)}


@pytest.fixture
def place(node: Node) -> Iterator[Place]:
    node.add_mig(1, 1, 0, (12, 13))
    node.add_mig(1, 2, 0, (21, 22))
    parts = [nvml_mig(0, 1, 0), nvml_mig(1, 2, 0)]
    node.take_inventory(nvml_gpu(0), nvml_gpu(1, mig=True, mig_devices=parts))
    with ExitStack() as sockets:
        yield Place(node, sockets)


def test_processes_are_known_by_the_numbers_of_what_they_have_open(place: Place) -> None:
    dev = place.node.dev
    place.node.add_node("elsewhere", 195, 0)  # a container may use another name
    place.process(10, "python", f"{dev}/nvidia0", f"{dev}/nvidiactl", "/dev/null")
    place.process(11, "renamed", f"{dev}/elsewhere")
    place.process(12, "nvidia-cuda-mps", f"{dev}/nvidia0")
    place.process(13, "nvidia-persiste", f"{dev}/nvidia0", f"{dev}/nvidia1")
    place.process(
        14, "part", f"{dev}/nvidia1", *(f"{dev}/nvidia-caps/nvidia-cap{n}" for n in (12, 13))
    )
    place.process(15, "control", f"{dev}/nvidiactl")
    place.process(16, "nothing", "/dev/null", "socket:[17]")
    assert place.kinds("0") == {
        ("process", "python", ("GPU 0",)),
        ("process", "renamed", ("GPU 0",)),
        ("mps", "nvidia-cuda-mps", ("GPU 0",)),
        ("persistenced", "nvidia-persiste", ("GPU 0",)),
    }
    assert place.kinds("1:0") == {("process", "part", ("MIG device 1:0",))}
    assert place.kinds("1:1") == set()
    assert {name for _, name, _ in place.kinds("1")} == {"nvidia-persiste", "part"}
    assert {name for _, name, _ in place.kinds()} == {
        "python", "renamed", "nvidia-cuda-mps", "nvidia-persiste", "part", "control",
    }  # fmt: skip


def test_modules_of_others_keep_the_drivers_loaded(place: Place) -> None:
    for module, user in (("nvidia", "nvidia_uvm"), ("nvidia", "gdrdrv"), ("nvidia_uvm", "other")):
        (place.node.sys / f"module/{module}/holders/{user}").mkdir(parents=True)
    assert place.kinds() == {("module", "gdrdrv", ()), ("module", "other", ())}
    assert place.kinds("0") == set()


def test_what_the_kernel_counts_and_nobody_shows_is_a_holder_of_the_driver(place: Place) -> None:
    """For example, persistence mode without its daemon."""
    module = place.node.sys / "module/nvidia"
    (module / "holders/nvidia_uvm").mkdir(parents=True)
    (module / "refcnt").write_text("1\n")
    assert place.kinds() == set()
    (module / "refcnt").write_text("3\n")
    assert place.kinds() == {("kernel", "2 uses of the module nvidia", ())}
    assert place.kinds("0") == set()
    place.process(50, "python", f"{place.node.dev}/nvidiactl")
    assert {kind for kind, _, _ in place.kinds()} == {"process"}


def test_the_agent_is_one_that_lets_go_if_it_is_to(place: Place) -> None:
    dev = place.node.dev
    place.process(20, "nvshim")
    place.process(21, "python", f"{dev}/nvidia0", parent=20)
    place.process(22, "nvidia-cuda-mps", f"{dev}/nvidia0", parent=20)
    place.process(23, "python", f"{dev}/nvidia0")
    lock = Path(place.node.config.state, "node.lock")
    lock.write_text("20\n")
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        found = place.found("0")
    assert [(each.kind, each.pid) for each in found] == [(AGENT, 21), (MPS, 22), ("process", 23)]
    assert [each.pid for each in blocking(found, lets_go=False)] == [22, 23]
    assert [each.pid for each in blocking(found, lets_go=True)] == [21, 22, 23]
    assert [each.pid for each in not_by_themselves(found)] == [23]


def test_the_agent_lets_go_in_a_container_too(place: Place) -> None:
    node = f"{place.node.dev}/nvidia0"
    place.bundle("agent", pid=20)
    place.bundle("other", pid=30)
    place.process(21, "python", node, parent=20, cgroup="/pods/agent")
    place.process(22, "nvidia-cuda-mps", node, cgroup="/pods/agent")
    # A tenant's process can have any name.
    place.process(31, "nvidia-cuda-mps", node, parent=30, cgroup="/pods/other")
    lock = Path(place.node.config.state, "node.lock")
    lock.write_text("20\n")
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        found = place.found("0")
    assert [(each.kind, each.pid) for each in found] == [(AGENT, 21), (MPS, 22), (CONTAINER, 31)]


def test_a_container_holds_from_its_record_to_the_end_of_its_init(place: Place) -> None:
    made = place.bundle("being-made", 0)
    place.bundle("never-made", 0, listens=False)
    place.bundle("other", 1, pid=31)
    place.bundle("running", 0, pid=30)
    ended = place.bundle("ended", 0)
    (ended / "init.pid").write_text("4711")
    assert [(each.name, each.pid) for each in place.found("0")] == [
        ("k8s.io/being-made", 0), ("k8s.io/running", 30),
    ]  # fmt: skip
    place.begin(made, 32)
    # Its process with the open node belongs to the container, and is not another holder.
    place.process(33, "worker", f"{place.node.dev}/nvidia0", cgroup="/pods/running/below")
    place.process(34, "worker", f"{place.node.dev}/nvidia0", cgroup="/pods/other")
    assert [(each.kind, each.name, each.pid) for each in place.found("0")] == [
        (CONTAINER, "k8s.io/being-made", 32),
        (CONTAINER, "k8s.io/running", 30),
        (CONTAINER, "k8s.io/other", 34),
    ]
    assert {each.name for each in place.found()} == {
        "k8s.io/being-made", "k8s.io/running", "k8s.io/other",
    }  # fmt: skip


def test_a_container_that_a_busy_shim_is_making_holds(place: Place) -> None:
    place.bundle("busy", 0, listens=False)
    path = place.node.base / "busy.sock"
    path.unlink()
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        listener.listen(0)
        with suppress(BlockingIOError):
            while True:  # until its queue is full
                client = stack.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect(str(path))
        assert [(each.name, each.pid) for each in place.found("0")] == [("k8s.io/busy", 0)]


def test_one_whose_init_is_made_while_it_is_looked_at_has_not_stopped(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = place.bundle("starts", 0)

    def look_and_begin(states: Any, proc: str) -> Any:
        found = find_containers(states, proc)
        if not os.path.exists(bundle / "init.pid"):
            place.begin(bundle, 40)
        return found

    monkeypatch.setattr(holders, "all_containers", look_and_begin)
    # First it is listed as a container that is being created, then by its process.
    for pid in (0, 40):
        assert [(each.name, each.pid) for each in place.found("0")] == [("k8s.io/starts", pid)]


# A node that any user may create and open, and the program that has it open or mapped.
NULL: Final = os.makedev(1, 3)
OPENS: Final = """if True:
    import mmap, os, sys
    flags, path, does = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    fd = os.open(path, flags)
    if does == "map":
        mapped = mmap.mmap(fd, 4096, prot=mmap.PROT_READ)
        os.close(fd)
    print("open", flush=True)
    sys.stdin.read()
"""


@contextmanager
def has(path: str, flags: int, does: str = "open", within: tuple[str, ...] = ()) -> Iterator[int]:
    """Start a process that has only this node open or mapped."""
    words = [*within, sys.executable, "-c", OPENS, str(flags), path, does]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"open\n"
            yield process.pid
        finally:
            process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a node")
def test_a_descriptor_that_only_names_a_node_holds_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unprivileged container can do this: mknod, and open with O_PATH."""
    monkeypatch.setattr(holders, "read_majors", lambda _: {"nvidia": os.major(NULL)})
    node = place.node.add_node("nvidia7", os.major(NULL), os.minor(NULL))

    def pids() -> set[int]:
        inventory = load_inventory(place.node.config)
        states = [str(place.state)]
        found = find_holders((THE_DRIVER,), inventory, place.node.config, states, "/proc")
        return {each.pid for each in found}

    with has(str(node), os.O_RDONLY) as holds, has(str(node), os.O_PATH) as names:
        found = pids()
        assert holds in found
        assert names not in found


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a node")
def test_a_node_that_is_mapped_and_not_open_any_more_is_held(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    zero = os.makedev(1, 5)
    monkeypatch.setattr(holders, "read_majors", lambda _: {"nvidia": os.major(zero)})
    # With its own /dev, in which that name is a device node or another file.
    (tmp_path / "plain").write_bytes(bytes(4096))
    make = {
        True: f"mknod /dev/nvidia0 c {os.major(zero)} {os.minor(zero)}",
        False: f"cp {tmp_path}/plain /dev/nvidia0",
    }
    for is_node, prepare in make.items():
        script = f'mount -t tmpfs tmpfs /dev && {prepare} && exec "$@"'
        within = ("unshare", "--mount", "sh", "-c", script, "sh")
        with has("/dev/nvidia0", os.O_RDONLY, "map", within) as pid:
            inventory = load_inventory(place.node.config)
            states = [str(place.state)]
            found = find_holders((THE_DRIVER,), inventory, place.node.config, states, "/proc")
            assert (pid in {each.pid for each in found}) is is_node


def test_what_a_process_has_many_of_is_gone_through_once(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mounts are read once per namespace, and each node's number once."""
    dev = place.node.dev
    place.process(10, "python", *(f"{dev}/nvidia0" for _ in range(50)))
    here = place.proc / "10"
    (here / "fdinfo").mkdir()
    for number in range(50):
        (here / f"fdinfo/{number}").write_text("flags:\t02\nmnt_id:\t77\nino:\t5\n")
    asked: list[str] = []
    node, text = Procfs.node, Procfs.text

    def counted_node(procfs: Procfs, path: str) -> int:
        asked.append("node")
        return node(procfs, path)

    def counted_text(procfs: Procfs, pid: int | str, name: str) -> str:
        asked.append(name)
        return text(procfs, pid, name)

    monkeypatch.setattr(Procfs, "node", counted_node)
    monkeypatch.setattr(Procfs, "text", counted_text)
    assert {name for _, name, _ in place.kinds("0")} == {"python"}
    assert asked.count("node") == 1
    assert asked.count("mountinfo") <= 2


def test_a_container_whose_shim_does_not_take_its_end_is_told_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.bundle("one", 0)
    sent: list[signal.Signals] = []
    said: list[str] = []

    async def kill(_: Container, number: signal.Signals, *, timeout: float) -> None:
        sent.append(number)
        if sent.count(signal.SIGKILL) in {1, 2}:
            raise TimeoutError

    monkeypatch.setattr(waiting, "kill", kill)
    force = Force(0.0, said.append)
    for _ in range(6):
        force.end(place.found("0"))
    assert sent == [signal.SIGTERM, *[signal.SIGKILL] * 3]
    name = "k8s.io/one"
    assert said == [f"SIGTERM to {name}", f"SIGKILL to {name}", f"{name}: no answer"]


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_drain_waits_for_the_agent_as_long_as_it_is_told_to(
    monkeypatch: pytest.MonkeyPatch, *, is_closed: bool
) -> None:
    monkeypatch.setattr(serving, "_TO_LET_GO", 0.0)
    agent = (Holder(AGENT, "the node agent"),)
    looks = iter([agent, agent, agent, ()])
    wait = wait_for_holders if is_closed else partial(wait_for_holders, closing=lambda: None)
    left = wait(
        lambda: next(looks), DrainOptions(), lambda _: None, lets_go=True, seconds=math.inf
    )  # fmt: skip
    # For a reset the agent does without NVML no longer than it has to.
    assert tuple(left) == (() if is_closed else agent)
