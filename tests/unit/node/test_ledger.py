"""The holders of devices, from containers, the inventory and the kubelet's record."""

from __future__ import annotations

import errno
import json
import os
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import anyio
import pytest

from hooks.config import Config
from hooks.node.fingerprint import Fingerprint
from hooks.node.gpus import Gpu, MigDevice
from integration import exits
from integration.cli.app import main
from integration.containers.bundle_watch import watched_directories
from integration.containers.bundles import TASKS, Container, Pod
from integration.containers.held_devices import devices_of
from integration.containers.procfs import Procfs
from integration.kubelet.values import Allocated
from integration.node.holders.holders import holdings_of, unheld_of
from integration.node.holders.values import Holding, Unheld
from integration.node.options import Options
from integration.node.service import Context
from integration.node.services.ledger import service as component
from integration.nvml.snapshot import NodeSnapshot
from integration.watcher import Watcher
from shim import syscalls
from tests.harness.node_state import publish
from tests.harness.waiting import until
from tests.unit.node.inventories import node_with

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

pytestmark = pytest.mark.anyio

GPUS: Final = (
    Gpu(0, 0, "GPU-a", "0000:01:00.0", "A100", mig=True),
    Gpu(1, 3, "GPU-b", "0000:02:00.0", "A100"),
)
PARTS: Final = (
    MigDevice(0, 0, "MIG-1", 1, 0, caps=(12, 13)),
    MigDevice(0, 1, "MIG-2", 2, 0, caps=(21, 22)),
)


INVENTORY: Final = node_with(*GPUS, mig=PARTS)


@pytest.fixture
def proc(tmp_path: Path) -> Procfs:
    """Make a procfs: 7 is a container's process and 6 its shim; 9's shim is dead, so 1 has it."""
    for pid, parent, words in (
        (1, 0, "/sbin/init"),
        (6, 1, "/opt/x/containerd-shim-nvidia-v1\0-namespace\0k8s.io"),
        (7, 6, "python"),
        (9, 1, "python"),
    ):
        directory = tmp_path / "proc" / str(pid)
        directory.mkdir(parents=True)
        (directory / "stat").write_text(f"{pid} (a b) c) S {parent} " + "0 " * 40)
        (directory / "cmdline").write_text(words)
    return Procfs(str(tmp_path / "proc"))


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Container]:
    def make(
        name: str = "one",
        record: dict[str, Any] | None = None,
        *,
        pid: int = 7,
        spec: dict[str, Any] | None = None,
        pod: Pod | None = None,
        sandbox: bool = False,
        stopped: bool = False,
    ) -> Container:
        bundle = tmp_path / "tasks" / name
        bundle.mkdir(parents=True)
        if spec is not None:
            (bundle / "config.json").write_text(json.dumps(spec))
        return Container(
            name, "ns", str(bundle), pod, name, name, sandbox, pid, record, has_stopped=stopped
        )

    return make


def granted(*gpus: str, parts: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    return {"grant": {"gpus": [{"uuid": uuid} for uuid in gpus], "mig_devices": list(parts)}}


def node(path: str, kind: str = "c") -> dict[str, Any]:
    return {"path": path, "type": kind, "major": 195, "minor": 3}


def put(bundle: Path, record: str) -> Path:
    """Make a bundle, which is not watched yet."""
    bundle.mkdir(parents=True)
    (bundle / "nvidia.json").write_text(record)
    return bundle


def put_of_pod(bundle: Path, record: dict[str, Any], pod: str) -> None:
    named = {"namespace": "team", "name": pod}
    words = {f"io.kubernetes.cri.sandbox-{key}": word for key, word in named.items()}
    put(bundle, json.dumps(record))
    (bundle / "config.json").write_text(json.dumps({"annotations": words}))


CAPS_1: Final = ("/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap13")


@pytest.mark.parametrize(
    ("record", "spec", "devices", "gpus"),
    [
        (granted("GPU-b"), None, ["GPU-b"], ["GPU-b"]),
        (granted("GPU-gone"), None, ["GPU-gone"], ["GPU-gone"]),
        (granted(parts=({"uuid": "MIG-2", "gpu": 0},)), None, ["MIG-2"], ["GPU-a"]),
        (granted(parts=({"uuid": "MIG-old", "gpu": 1},)), None, ["MIG-old"], ["GPU-b"]),
        (granted(parts=({"uuid": "MIG-old", "gpu": 9},)), None, ["MIG-old"], []),
        ({"edits": {"devices": [{"path": "/dev/nvidia3"}]}}, None, ["GPU-b"], ["GPU-b"]),
        ({"edits": {"devices": [{"path": p} for p in CAPS_1]}}, None, ["MIG-1"], ["GPU-a"]),
        ({"policy": {}, "request": 3, "grant": []}, None, [], []),
        (None, {"linux": {"devices": [node("/dev/nvidia3")]}}, ["GPU-b"], ["GPU-b"]),
        (None, {"linux": {"devices": [node("/dev/nvidia3", "b")]}}, [], []),
        (None, {"linux": {"devices": [node("/dev/nvidia3")]},
                "process": {"capabilities": {"bounding": ["CAP_SYS_ADMIN"]}}}, [], []),
        (None, {"linux": {"devices": [None, "x", {}]}}, [], []),
        (None, {"linux": 3}, [], []),
        (None, None, [], []),
    ],
)  # fmt: skip
def test_what_a_container_holds(
    make: Callable[..., Container],
    record: dict[str, Any] | None,
    spec: dict[str, Any] | None,
    devices: list[str],
    gpus: list[str],
) -> None:
    found = devices_of(make(record=record, spec=spec), INVENTORY)
    assert (list(found[0]), list(found[1])) == (devices, gpus)


def test_without_an_inventory_the_records_tell(make: Callable[..., Container]) -> None:
    assert devices_of(make(record=granted("GPU-b")), None) == (("GPU-b",), ("GPU-b",))


def test_what_is_made_holds_and_what_has_stopped_or_is_a_sandbox_does_not(
    make: Callable[..., Container], proc: Procfs
) -> None:
    made = make("made", granted("GPU-b"), pid=0)
    stopped = make("stopped", granted("GPU-b"), pid=0, stopped=True)
    sandbox = make("sandbox", granted("GPU-b"), sandbox=True)
    found = holdings_of([made, stopped, sandbox, make("none")], INVENTORY, proc)
    assert [(each.container.id, each.stale, each.orphan) for each in found] == [("made", "", "")]


def test_a_privileged_container_holds_what_the_kubelet_has_given_it(
    make: Callable[..., Container], proc: Procfs
) -> None:
    web = Pod("team", "web")
    every = [node("/dev/nvidia0"), node("/dev/nvidia3")]
    admin = {"process": {"capabilities": {"bounding": ["CAP_SYS_ADMIN"]}}}
    made = make("main", spec={"linux": {"devices": every}, **admin}, pod=web)
    plain = make("plain", spec={"linux": {"devices": []}}, pod=web)
    allocated = {
        ("team", "web"): {
            "main": (("nvidia.com/gpu", "GPU-b::1"), ("a.b/c", "d")),
            "plain": (("nvidia.com/gpu", "GPU-a"),),
        }
    }
    holdings = holdings_of([made, plain], INVENTORY, proc, allocated)
    assert [(e.container.id, e.devices, e.gpus) for e in holdings] == [
        ("main", ("GPU-b",), ("GPU-b",))
    ]
    (unheld,) = unheld_of(allocated, holdings)
    assert (unheld.container, unheld.device) == ("plain", "GPU-a")


def test_orphans_are_told_from_those_that_somebody_knows(
    make: Callable[..., Container], proc: Procfs
) -> None:
    web, other = Pod("team", "web"), Pod("team", "other")
    containers = [
        make("known", granted("GPU-b"), pod=web),
        make("unknown", granted("GPU-b"), pod=other),
        make("no-pod", granted("GPU-b")),
        make("no-shim", granted("GPU-b"), pid=9, pod=other),
    ]
    allocated: Allocated = {("team", "web"): {}}
    found = {e.container.id: e.orphan for e in holdings_of(containers, None, proc, allocated)}
    gone, unknown = "its shim is gone, but it still runs", "the kubelet does not know its pod"
    assert found == {"known": "", "unknown": unknown, "no-pod": "", "no-shim": gone}
    silent = {e.container.id: e.orphan for e in holdings_of(containers, None, proc, None)}
    assert silent == {"known": "", "unknown": "", "no-pod": "", "no-shim": gone}


@pytest.mark.parametrize(
    ("before", "later", "orphan"),
    [
        ([], ["web"], ""),  # it was created while the bundles were read
        (["web"], [], ""),
        ([], [], "the kubelet does not know its pod"),
        ([], None, ""),
    ],
)
async def test_a_pod_that_comes_or_goes_meanwhile_is_no_orphan(
    tmp_path: Path, before: list[str], later: list[str] | None, orphan: str
) -> None:
    for pod in ("gone", "web"):
        put_of_pod(tmp_path / TASKS / "ns" / pod, granted("GPU-b"), pod)

    async def says() -> Allocated | None:
        return None if later is None else {("team", name): {} for name in later}

    said: Allocated = {("team", name): {} for name in ("gone", *before)}
    ledger = await component.look_and_ask([str(tmp_path)], None, said, says)
    assert {each.container.id: each.orphan for each in ledger.holdings} == {
        "gone": "", "web": orphan,
    }  # fmt: skip


def test_what_a_container_of_a_pod_was_denied_is_told(tmp_path: Path) -> None:
    put_of_pod(tmp_path / TASKS / "ns" / "one", {"policy": {"denied": ["all:\nnobody"]}}, "web")
    put(tmp_path / TASKS / "ns" / "no-pod", json.dumps({"policy": {"denied": ["all"]}}))
    (denied,) = component.look([str(tmp_path)], None).denied
    assert (denied.namespace, denied.pod, denied.why) == ("team", "web", "all: nobody")


@pytest.mark.parametrize("denied", [5, "all", {"all": 1}, [5, None]])
def test_a_record_of_another_shape_was_denied_nothing(tmp_path: Path, denied: Any) -> None:
    put_of_pod(tmp_path / TASKS / "ns" / "one", {"policy": {"denied": denied}}, "web")
    assert component.look([str(tmp_path)], None).denied == ()


def test_a_driver_that_is_another_makes_a_holding_stale(
    make: Callable[..., Container], proc: Procfs, tmp_path: Path
) -> None:
    library = tmp_path / "libcuda.so.1"
    library.write_text("new")
    identity = {
        "driver": "1", "proc": str(tmp_path), "sys": str(tmp_path), "modules": [],
        "observations": [["stat", str(library), "something else"]],
    }  # fmt: skip
    record = {**granted("GPU-b"), "identity": identity}
    (stale,) = holdings_of([make("stale", record)], None, proc)
    assert stale.stale.endswith("libcuda.so.1 is not the one that it was made with")
    damaged = {**granted("GPU-b"), "identity": {"driver": 3}}
    (whole,) = holdings_of([make("damaged", damaged)], None, proc)
    assert whole.stale == ""


def test_what_the_kubelet_gave_and_nobody_holds(make: Callable[..., Container]) -> None:
    pod = Pod("team", "web")
    holdings = [Holding(make("server", pod=pod), ("GPU-a", "MIG-1"))]
    given = (
        ("nvidia.com/gpu", "GPU-a::3"),
        ("nvidia.com/mig-1g.10gb", "MIG-1"),
        ("nvidia.com/gpu", "GPU-b"),
        ("example.com/fpga", "f0"),
    )
    allocated: Allocated = {
        ("team", "web"): {"server": given},
        ("team", "late"): {"server": given[:1]},
    }
    assert unheld_of(allocated, holdings) == (
        Unheld("team", "web", "server", "nvidia.com/gpu", "GPU-b"),
        Unheld("team", "late", "server", "nvidia.com/gpu", "GPU-a::3"),
    )
    # The pid is that of a container with a process, not of a sandbox with the same name.
    for pid, sandbox, runs in ((7, False, 7), (0, False, 0), (7, True, 0)):
        made = make(f"late-{pid}-{sandbox}", pid=pid, pod=Pod("team", "late"), sandbox=sandbox)
        *_, late = unheld_of(allocated, holdings, [replace(made, name="server")])
        assert (late.pod, late.pid) == ("late", runs)


# -- watching containers ---------------------------------------------------------------------


async def heard(watcher: Watcher, state: str) -> bool:
    """Wait for an event, then watch everything new; return whether there was one."""
    told = await watcher.wait(10)
    while watcher.follow(watched_directories([state])):
        told = True
    return told


async def test_a_state_that_comes_later_and_what_comes_below_it_is_heard(tmp_path: Path) -> None:
    state = str(tmp_path / "run" / "containerd")
    bundle = Path(f"{state}/{TASKS}/ns/one")
    with Watcher(0.2) as watcher:
        assert watcher.follow(watched_directories([state]))
        assert not watcher.follow(watched_directories([state]))
        (tmp_path / "noise").write_text("")
        assert not await watcher.wait(0.3)
        for made in (os.path.dirname(state), state, f"{state}/{TASKS}", f"{state}/{TASKS}/ns"):
            os.mkdir(made)
            assert await heard(watcher, state)
        bundle.mkdir()
        assert await heard(watcher, state)
        for noise in ("log.json", "exec.x.pid"):
            (bundle / noise).write_text("")
        assert not await watcher.wait(0.3)
        (bundle / "nvidia.json").write_text("{}")
        assert await heard(watcher, state)
        (bundle / "nvidia.json").unlink()
        assert await heard(watcher, state)
        for noise in ("log.json", "exec.x.pid"):
            (bundle / noise).unlink()
        bundle.rmdir()
        assert await heard(watcher, state)
        assert not await watcher.wait(0.3)
        assert watcher.deaf == ""


@asynccontextmanager
async def at_work(
    tmp_path: Path, say: Callable[..., None], poll: float = 1000
) -> AsyncIterator[Context]:
    """Run the service for the containers below ``state``."""
    options = Options("", poll, states=(str(tmp_path / "state"),), pod_resources="")
    context = Context(Config(state=str(tmp_path / "own")), options, say)
    publish(context.state.node, NodeSnapshot(inventory=INVENTORY))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(component.run, context)
        yield context
        tasks.cancel_scope.cancel()


async def test_the_part_posts_and_writes_and_begins_with_what_its_predecessor_had(
    tmp_path: Path,
) -> None:
    said: list[tuple[Any, ...]] = []
    file, aside = tmp_path / "own" / component.FILE, tmp_path / "aside"

    def say(*words: Any, **_: Any) -> None:
        said.append(words)

    def written() -> dict[str, Any]:
        return cast("dict[str, Any]", json.loads(file.read_text()))

    async with at_work(tmp_path, say) as context:
        await until(file.exists)
        assert written()["holdings"] == []
        put(aside / "one", json.dumps(granted("GPU-b")))
        put(aside / "\x1bhalf", "{")
        (tmp_path / "state" / TASKS).mkdir(parents=True)
        aside.rename(tmp_path / "state" / TASKS / "ns")
        await until(lambda: written()["holdings"] and context.state.ledger.value.unknown)
        (holder,) = context.state.ledger.value.holders("GPU-b")
    assert holder.devices == ("GPU-b",)
    before = written()
    assert before["holdings"][0]["bundle"].endswith("/ns/one")
    async with at_work(tmp_path, say) as context:
        (again,) = await until(lambda: context.state.ledger.value.holders("GPU-b"))
        await until(lambda: len(said) == 2)
    assert again == holder
    assert written() == before
    assert [words[0] for words in said] == ["warning", "warning"]
    assert all(words[1].startswith("the record of \\x1bhalf in ") for words in said)
    file.unlink()
    file.mkdir()
    async with at_work(tmp_path, say) as context:
        fault = await until(lambda: context.state.faults.lines.get("ledger", ""))
    assert fault.startswith("NVSHIM-E2765 ledger-unwritten: ")


async def test_what_could_not_be_watched_is_watched_once_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One container exceeds the inotify limit; there is room again when the next one starts."""
    watch, full = syscalls.inotify_watch_changes, True

    def limited(fd: int, directory: str, *, content: bool = True) -> int:
        if full and directory.endswith("/one"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return watch(fd, directory, content=content)

    monkeypatch.setattr(syscalls, "inotify_watch_changes", limited)
    namespace = tmp_path / "state" / TASKS / "ns"
    namespace.mkdir(parents=True)
    said: list[str] = []

    def say(_: str, __: str, *, why: str) -> None:
        assert why != "resolved" or not full, "it is still so"
        said.append(why)

    async with at_work(tmp_path, say) as context:
        await until(lambda: os.path.exists(tmp_path / "own" / component.FILE))
        (namespace / "one").mkdir()
        await until(lambda: said == ["No space left on device"])
        put(tmp_path / "other", json.dumps(granted("GPU-a"))).rename(namespace / "other")
        await until(lambda: context.state.ledger.value.holders("GPU-a"))
        full = False
        put(tmp_path / "third", json.dumps(granted("GPU-a"))).rename(namespace / "third")
        await until(lambda: len(context.state.ledger.value.holders("GPU-a")) == 2)
        await until(lambda: said == ["No space left on device", "resolved"])
        (namespace / "one" / "nvidia.json").write_text(json.dumps(granted("GPU-b")))
        await until(lambda: context.state.ledger.value.holders("GPU-b"))


async def test_a_driver_that_nobody_told_of_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, real = [], component.look

    def counted(*args: Any) -> Any:
        looks.append(1)
        return real(*args)

    monkeypatch.setattr(component, "look", counted)
    library = tmp_path / "libcuda.so.1"
    library.write_text("old")
    fingerprint = Fingerprint("/")
    fingerprint.observe("stat", str(library))
    identity = {
        "driver": "1", "proc": str(tmp_path), "sys": str(tmp_path), "modules": [],
        "observations": [[*key, seen] for key, seen in fingerprint.observations.items()],
    }  # fmt: skip
    record = json.dumps({**granted("GPU-b"), "identity": identity})
    put(tmp_path / "state" / TASKS / "ns" / "one", record)
    said: list[tuple[Any, ...]] = []
    async with at_work(tmp_path, lambda *words, **_: said.append(words), 0.05) as context:
        await until(lambda: context.state.ledger.value.holdings)
        before = len(looks)
        await anyio.sleep(0.4)
        # Events do not cause repeated reads.
        assert len(looks) <= before + 3
        assert said == []
        (tmp_path / "another").write_text("new")
        (tmp_path / "another").rename(library)
        await until(lambda: context.state.ledger.value.holdings[0].stale)
    assert said[0] == ("warning", "container is stale: drain its pod")


def test_what_cannot_be_read_is_told_without_what_moves_the_cursor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = put(tmp_path / TASKS / "ns" / "one", "damaged")
    (bundle / "config.json").write_text('{"annotations": {"nerdctl/name": "evil\\u001b[2J"}}')
    assert main(["ledger", "check", "--containerd-state", str(tmp_path)]) == exits.OK
    told = capsys.readouterr().err
    assert "the record of evil\\x1b[2J in" in told
    assert "\x1b" not in told
