"""A shim whose installation was removed: it has loaded everything that it may need."""

from __future__ import annotations

import os
import shutil
import signal
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from api import typeurl
from api.proto import runtimeoptions_pb2
from api.ttrpc import RemoteError
from api.ttrpc.client import connect
from integration.simulated import SimulatedNode
from integration.tree import Tree
from tests.harness.dist import copied
from tests.harness.killing import straced
from tests.harness.launcher import INTERPRETER, REPOSITORY, SITE
from tests.harness.loggers import GOOD, Loggers, loggers_directory
from tests.harness.node import node_of
from tests.harness.runtime import is_alive
from tests.harness.sandbox import SandboxByHand
from tests.harness.shim import ShimByHand, shim_by_hand
from tests.harness.waiting import eventually
from tools.launcher import compile_native, write_launcher

pytestmark = pytest.mark.anyio

SLEEP = ("sleep", "1000")
GPUS = ("NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=all")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a separate installation, with everything except the interpreter's files."""
    path = tmp_path / "tree"
    for room in ("api", "hooks", "shim"):
        shutil.copytree(f"{REPOSITORY}/{room}", path / "lib" / room)
    shutil.copytree(SITE, path / "site")
    launcher = str(path / "containerd-shim-nvidia-v1")
    write_launcher(
        f"{launcher}.py",
        interpreter=INTERPRETER,
        library_paths=[str(path / "lib"), str(path / "site")],
    )
    compile_native(launcher, compiler="gcc")
    return path


@pytest.fixture(scope="module")
def well_kept() -> Iterator[Loggers]:
    with loggers_directory() as made:
        yield made


@contextmanager
def _opens_nothing(pid: int, interpreters: str, trace: Path) -> Iterator[None]:
    """Fail if a process opens a file of its interpreter meanwhile."""
    with straced(pid, "open,openat", trace):
        yield
    opened = [line for line in trace.read_text().splitlines() if f'"{interpreters}' in line]
    assert [line for line in opened if line.split()[0] == str(pid)] == []


async def _refused(shim: ShimByHand, method: str, **fields: Any) -> str:
    with pytest.raises(RemoteError) as refused:
        await shim.call(method, **fields)
    assert "No module" not in str(refused.value)
    return str(refused.value)


async def _use_container(shim: ShimByHand, name: str) -> None:
    """Make every request about an existing container."""
    out = os.path.join(shim.directory, f"{name}.out")
    await shim.run(name, stdout=f"file://{out}", stderr=f"file://{out}")
    await shim.call("State", id=name)
    await shim.call("Connect", id=name)
    await shim.call("Pids", id=name)
    assert (await shim.call("Stats", id=name)).stats.value
    limits = typeurl.pack_json({"pids": {"limit": 50}}, typeurl.LINUX_RESOURCES)
    await shim.call("Update", id=name, resources=limits)
    await shim.call("Pause", id=name)
    await shim.call("Resume", id=name)
    # CRIU may or may not be installed.
    try:
        await shim.call("Checkpoint", id=name, path=os.path.join(shim.directory, f"{name}.saved"))
    except RemoteError as refused:
        assert "No module" not in str(refused)  # noqa: PT017 - it may also succeed
    odd = typeurl.pack_json({"args": 7, "env": 8}, typeurl.PROCESS)
    await shim.call("Exec", id=name, exec_id="odd", spec=odd)
    await _refused(shim, "Start", id=name, exec_id="odd")
    await shim.start_exec(name, "e1", "cat", terminal=True, stdin=shim.fifo(f"{name}.in"))
    await shim.call("ResizePty", id=name, exec_id="e1", width=80, height=24)
    await shim.call("CloseIO", id=name, exec_id="e1", stdin=True)
    await shim.reap(name, "e1")
    await shim.start_exec(name, "e2", *SLEEP)
    await shim.call("Kill", id=name, exec_id="e2", signal=signal.SIGKILL)
    await shim.reap(name, "e2")
    await shim.end(name)


async def _fail_in_every_way(shim: ShimByHand, name: str) -> None:
    """Make requests that fail, with expected and unexpected errors."""
    for method in ("State", "Kill", "Delete", "Stats", "Pause"):
        await _refused(shim, method, id="unknown")
    nowhere = os.path.join(shim.directory, "nowhere")
    await _refused(shim, "Create", id="unknown", bundle=nowhere)
    options = typeurl.pack(runtimeoptions_pb2.Options(config_body=b"binary_name = ["))
    bundle = os.path.join(shim.directory, name)
    await _refused(shim, "Create", id=name, bundle=bundle, options=options)
    broken = shim.options(before="exit 3")
    assert "exit status 3" in await _refused(shim, "Create", id=name, bundle=bundle, options=broken)


async def _use_loggers(shim: ShimByHand, name: str, well_kept: Loggers) -> None:
    uri = well_kept.uri(GOOD)
    await shim.run(name, stdout=uri, stderr=uri)
    await shim.end(name)


async def _use_sandbox(shim: ShimByHand) -> None:
    pod = SandboxByHand(shim)
    shim.sandbox_bundle("pod")
    await pod.start(hostname="web-1")
    assert await pod.state() == "SANDBOX_READY"
    await pod.call("Platform")
    await pod.call("PingSandbox")
    await pod.call("StopSandbox")
    await pod.call("WaitSandbox")
    await pod.call("ShutdownSandbox")


async def _do_all(shim: ShimByHand, first: str, well_kept: Loggers) -> None:
    rootfs = f"{shim.directory}/{first}/rootfs"
    await _use_container(shim, first)
    for name in ("broken", "logged"):
        shim.bundle(name, *SLEEP, rootfs=rootfs)
    await _fail_in_every_way(shim, "broken")
    await _use_loggers(shim, "logged", well_kept)
    # A separate image: only deleting the bundle undoes the injection.
    shim.bundle("gpus", *SLEEP, env=GPUS)
    gpus = await shim.run("gpus")
    assert "nvidia0" in os.listdir(f"/proc/{gpus}/root/dev")
    await shim.end("gpus")
    lines = await shim.log_lines(first, signal.SIGUSR1)
    assert [line for line in lines if "level=info msg=task" in line]
    assert not [line for line in lines if "No module" in line]
    await _use_sandbox(shim)
    await shim.until_gone()


async def test_a_shim_does_all_that_it_is_asked_when_its_tree_was_removed(
    tree: Path, tmp_path: Path, two_gpus: SimulatedNode, well_kept: Loggers
) -> None:
    environment = {"NVSHIM_CONFIG": two_gpus.config_path}
    launcher = str(tree / "containerd-shim-nvidia-v1")
    async with shim_by_hand(launcher, "c1", *SLEEP, environment=environment, debug=True) as shim:
        await shim.until_loaded("c1")
        shutil.rmtree(tree)
        with _opens_nothing(shim.pid, sysconfig.get_path("stdlib"), tmp_path / "trace"):
            await _do_all(shim, "c1", well_kept)


async def test_a_forked_shim_does_all_that_it_is_asked_when_its_tree_was_moved_away(
    tree: Path, tmp_path: Path, two_gpus: SimulatedNode, well_kept: Loggers
) -> None:
    async with node_of(str(tree / "containerd-shim-nvidia-v1")) as node:
        node.shims.environment["NVSHIM_CONFIG"] = two_gpus.config_path
        await node.start("c1")
        (server,) = node.servers()
        node.shims.pid = await node.start("c2")
        tree.rename(tmp_path / "elsewhere")
        async with connect(node.sockets[-1]) as node.shims.client:
            with _opens_nothing(node.shims.pid, sysconfig.get_path("stdlib"), tmp_path / "trace"):
                await _do_all(node.shims, "c2", well_kept)
        eventually(lambda: not is_alive(server), "the fork server without files exits")


async def test_a_container_gets_its_gpu_when_the_interpreter_for_nvml_was_removed(
    built_tree: Tree, tmp_path: Path, own_gpus: SimulatedNode
) -> None:
    # After an upgrade, no inventory is valid for the shims of the version before.
    tree = copied(built_tree, str(tmp_path / "installed"))
    launcher = f"{tree.path}/bin/containerd-shim-nvidia-v1"
    environment = {"NVSHIM_CONFIG": own_gpus.config_path}
    async with shim_by_hand(launcher, "c1", *SLEEP, environment=environment, debug=True) as shim:
        await shim.until_loaded("c1")
        await shim.run("c1")
        shutil.rmtree(tree.path)
        rootfs = f"{shim.directory}/c1/rootfs"
        shim.bundle("gpu", *SLEEP, rootfs=rootfs, env=("NVIDIA_VISIBLE_DEVICES=1",))
        nodes = os.listdir(f"/proc/{await shim.run('gpu')}/root/dev")
        assert [name for name in nodes if name[-1].isdecimal() and "nvidia" in name] == ["nvidia1"]
        await shim.finish()
