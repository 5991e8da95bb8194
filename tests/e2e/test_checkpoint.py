"""Checkpoint and restore of containers, with direct calls to the shim."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self

import anyio
import pytest

from api.errors import Status
from api.proto import events_pb2
from api.proto.deviceplugin_pb2 import ContainerAllocateResponse
from integration.simulated import Scenario, SimulatedNode
from tests.e2e.checkpoints import COUNT, checkpointing, left_in, refusal, with_criu
from tests.harness import engine_cdi
from tests.harness.engine_cdi import trap
from tests.harness.kubelet_root import KubeletRoot
from tests.harness.low_level import crun_for_this_host
from tests.harness.runtime import is_alive
from tests.harness.shim import ShimByHand, StartShim
from tools.images import glibc
from tools.nodes import changed_node

pytestmark = pytest.mark.anyio


# CRIU refuses to save a file lock unless an option allows it.
# The file is empty for a moment at each number.
COUNTED: Final = "until test 0$(cat /dev/shm/i) -gt 1; do :; done; exit 3"
LOCKED: Final = ("flock", "/dev/shm/lock", "sh", "-c", COUNT)


class Output:
    """A container's stdout, with a number in each line."""

    def __init__(self, shim: ShimByHand, name: str) -> None:
        self.path = shim.fifo(name)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        self._text = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    @property
    def numbers(self) -> list[int]:
        """Return all numbers so far."""
        with suppress(BlockingIOError):
            while chunk := os.read(self._fd, 1 << 16):
                self._text += chunk
        whole, _, _ = self._text.rpartition(b"\n")
        return [int(line) for line in whole.split()]

    async def more(self, count: int = 5) -> int:
        """Wait for ``count`` more numbers; return the last."""
        before = len(self.numbers)
        with anyio.fail_after(60):
            while len(self.numbers) < before + count:  # noqa: ASYNC110 - seen from outside
                await anyio.sleep(0.01)
        return self.numbers[-1]


async def _told_by_exec(shim: ShimByHand, container: str, script: str) -> str:
    """Return what a shell in a container prints."""
    path = os.path.join(shim.directory, f"told-by-{container}")
    await shim.start_exec(container, "look", "sh", "-c", script, stdout=f"file://{path}")
    status = (await shim.call("Wait", id=container, exec_id="look")).exit_status
    await shim.call("Delete", id=container, exec_id="look")
    text = await anyio.Path(path).read_text()
    assert status == 0, text
    return text


def _driver_mounts_in(pid: int) -> list[str]:
    """Return the driver's mounts in a container, with their options."""
    with open(f"/proc/{pid}/mountinfo", encoding="utf-8") as file:
        mounts = [" ".join(line.split()[4:6]) for line in file]
    return sorted(m for m in mounts if "nvidia" in m or "cuda" in m)


@pytest.fixture(params=["runc", "crun"])
def binary(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return each low-level runtime that is built with CRIU."""
    if request.param == "runc":
        return "runc"
    crun = shutil.which("crun") or ""
    features = subprocess.run([crun, "--version"], capture_output=True, check=True).stdout
    if b"+CRIU" not in features:
        pytest.skip("this crun is built without CRIU")
    if crun_for_this_host(str(tmp_path), crun) != crun:
        pytest.skip("crun does not know this host's cgroups, and CRIU makes them all")
    return crun


async def test_restored_container_goes_on_where_it_was_saved(
    start_shim: StartShim, criu: str, binary: str, tmp_path: Path
) -> None:
    saved = str(tmp_path / "saved")
    options = with_criu(criu, binary_name=binary)
    async with start_shim("c1", "sh", "-c", COUNT) as shim:
        with Output(shim, "one") as one, Output(shim, "two") as two:
            pid = await shim.run("c1", stdout=one.path, options=options)
            last = await one.more()
            await shim.call("Checkpoint", id="c1", path=saved, options=checkpointing(exit=True))
            waited = await shim.call("Wait", id="c1")
            assert waited.exit_status == 128 + signal.SIGKILL
            assert not is_alive(pid)
            await shim.call("Delete", id="c1")
            last = one.numbers[-1]  # of all its output
            assert "descriptors.json" in os.listdir(saved)

            shim.bundle("c2", "sh", "-c", COUNT)
            assert await shim.create("c2", stdout=two.path, options=options, checkpoint=saved) == 0
            state = await shim.call("State", id="c2")
            assert (state.pid, await shim.status("c2")) == (0, "CREATED")
            pid = (await shim.call("Start", id="c2")).pid
            assert is_alive(pid)
            assert await shim.status("c2") == "RUNNING"
            await two.more()
            assert two.numbers[:2] in ([last, last + 1], [last + 1, last + 2])
            # It works like any container: execs, pids, signals, its exit.
            await shim.start_exec("c2", "e1", "sh", "-c", COUNTED)
            assert await shim.reap("c2", "e1") == 3
            assert pid in {p.pid for p in (await shim.call("Pids", id="c2")).processes}
            await shim.call("Kill", id="c2", signal=signal.SIGTERM)
            assert (await shim.call("Wait", id="c2")).exit_status == 7
            deleted = await shim.call("Delete", id="c2")
            assert (deleted.pid, deleted.exit_status) == (pid, 7)
        await shim.events.until("TaskDelete", count=2)
        assert shim.events.of("c1") == [
            "TaskCreate", "TaskStart", "TaskCheckpointed", "TaskExit", "TaskDelete",
        ]  # fmt: skip
        assert shim.events.of("c2") == [
            "TaskCreate", "TaskStart", "TaskExecAdded e1", "TaskExecStarted e1", "TaskExit e1",
            "TaskExit", "TaskDelete",
        ]  # fmt: skip
        created = [e for e in shim.events.events if isinstance(e, events_pb2.TaskCreate)]
        assert [(e.checkpoint, bool(e.pid)) for e in created] == [("", True), (saved, False)]
        (checkpointed,) = (
            e for e in shim.events.events if isinstance(e, events_pb2.TaskCheckpointed)
        )
        assert checkpointed.checkpoint == saved
        for bundle in ("c1", "c2"):
            assert left_in(f"{shim.directory}/{bundle}") == []


async def test_container_that_its_runtime_has_forgotten_is_deleted(start_shim: StartShim) -> None:
    """crun forgets a container after checkpointing and stopping it, and has no error for that."""
    forgets = """
    if [ "$verb" = delete ]; then
        $binary --root "$2" delete "$8"
        echo '{"level":"error","msg":"cannot open directory: No such file or directory"}' >"$4"
        exit 1
    fi
    """
    async with start_shim("c1", "sh", "-c", "exit 3") as shim:
        await shim.run("c1", options=shim.options(before=forgets))
        await shim.call("Wait", id="c1")
        assert (await shim.call("Delete", id="c1")).exit_status == 3
        assert shim.leftovers() == [f"socket {shim.socket_path}", f"process {shim.pid}"]


async def test_container_goes_on_and_may_be_saved_again(
    start_shim: StartShim, criu: str, tmp_path: Path
) -> None:
    async with start_shim("c1", "sh", "-c", COUNT) as shim:
        with Output(shim, "one") as one, Output(shim, "two") as two:
            pid = await shim.run("c1", stdout=one.path, options=with_criu(criu))
            await one.more()
            work = str(tmp_path / "work")
            first = str(tmp_path / "first")
            await shim.call(
                "Checkpoint", id="c1", path=first, options=checkpointing(work_path=work)
            )
            assert "dump.log" in os.listdir(work)
            last = await one.more()
            # containerd also pauses a container while it copies its files.
            await shim.call("Pause", id="c1")
            second = str(tmp_path / "second")
            await shim.call("Checkpoint", id="c1", path=second)
            assert await shim.status("c1") == "PAUSED"
            await shim.call("Resume", id="c1")
            assert await one.more() > last
            numbers = one.numbers
            assert numbers == list(range(1, len(numbers) + 1)), "no output is lost or repeated"
            assert is_alive(pid)
            assert await shim.end("c1") == 128 + signal.SIGKILL
            # A container that was saved while paused runs after its restore.
            shim.bundle("c2", "sh", "-c", COUNT)
            await shim.create("c2", stdout=two.path, options=with_criu(criu), checkpoint=second)
            await shim.call("Start", id="c2")
            assert await two.more() > last
            assert await shim.end("c2") == 128 + signal.SIGKILL
        assert shim.events.of("c1")[2:5] == ["TaskCheckpointed", "TaskPaused", "TaskCheckpointed"]
        assert shim.leftovers() == [f"socket {shim.socket_path}", f"process {shim.pid}"]


async def test_what_criu_refuses_is_said_and_the_container_goes_on(
    start_shim: StartShim, criu: str, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    async with start_shim("c1", *LOCKED, image=glibc()) as shim:
        with Output(shim, "one") as one, Output(shim, "two") as two:
            await shim.run("c1", stdout=one.path, options=with_criu(criu))
            await one.more()
            for how in (checkpointing(), checkpointing(exit=True)):
                _, message = await refusal(
                    shim, "Checkpoint", id="c1", path=str(saved), options=how
                )
                assert "NVSHIM-E1527 checkpoint-failed" in message
                assert "CRIU: Some file locks are hold by dumping tasks" in message
                assert not saved.exists(), "the written files are removed"
                await one.more()
            assert await shim.status("c1") == "RUNNING"
            kept = f"{shim.directory}/c1/criu-dump.log"
            assert kept in message
            assert "file locks" in await anyio.Path(kept).read_text()
            assert left_in(f"{shim.directory}/c1") == ["criu-dump.log"]
            # Existing files are not touched.
            saved.mkdir()
            (saved / "mine").touch()
            await refusal(shim, "Checkpoint", id="c1", path=str(saved))
            assert os.listdir(saved) == ["mine"]
            # With the option it works, and the restore passes the option by itself.
            how = checkpointing(file_locks=True, exit=True)
            await shim.call("Checkpoint", id="c1", path=str(saved), options=how)
            await shim.reap("c1")
            last = one.numbers[-1]  # of all its output
            shim.bundle("c2", *LOCKED, image=glibc())
            await shim.create("c2", stdout=two.path, options=with_criu(criu), checkpoint=str(saved))
            await shim.call("Start", id="c2")
            await two.more()
            assert two.numbers[0] in (last, last + 1)
            await shim.start_exec("c2", "e1", "flock", "-n", "/dev/shm/lock", "true")
            assert await shim.reap("c2", "e1") == 1, "it is held"
            await shim.end("c2")


async def test_terminal_is_saved_and_restored(
    start_shim: StartShim, criu: str, tmp_path: Path
) -> None:
    saved = str(tmp_path / "saved")
    async with start_shim("c1", "sh", "-c", COUNT) as shim:
        with Output(shim, "one") as one, Output(shim, "two") as two:
            terminal = {"terminal": True, "options": with_criu(criu)}
            await shim.run("c1", stdout=one.path, **terminal)
            last = await one.more()
            await shim.call("Checkpoint", id="c1", path=saved, options=checkpointing(exit=True))
            await shim.reap("c1")
            shim.bundle("c2", "sh", "-c", COUNT)
            await shim.create("c2", stdout=two.path, checkpoint=saved, **terminal)
            await shim.call("Start", id="c2")
            assert await two.more() > last
            await shim.call("ResizePty", id="c2", width=90, height=30)
            await shim.start_exec(
                "c2", "e1", "sh", "-c", "test \"$(stty size </dev/pts/0)\" = '30 90'"
            )
            assert (await shim.call("Wait", id="c2", exec_id="e1")).exit_status == 0
            await shim.end("c2")
        assert shim.leftovers() == [f"socket {shim.socket_path}", f"process {shim.pid}"]


async def test_restored_container_has_the_gpus_that_a_created_one_has(
    start_shim: StartShim, criu: str, tmp_path: Path, workshop: str
) -> None:
    """The shim mounts libraries, creates devices and writes files before the restore."""
    saved = str(tmp_path / "saved")
    look = "probe dlopen libcuda.so.1 && stat -c %t:%T /dev/nvidia1 && echo $LD_LIBRARY_PATH"
    asks: dict[str, Any] = {
        "env": ["NVIDIA_VISIBLE_DEVICES=1", "NVIDIA_DRIVER_CAPABILITIES=compute"],
        "image": glibc(),
    }
    with SimulatedNode.create(f"{workshop}/checkpoint", Scenario.load("two")) as node:
        environment = {"NVSHIM_CONFIG": node.config_path}
        async with start_shim("c1", "sh", "-c", COUNT, environment=environment, **asks) as shim:
            with Output(shim, "one") as one, Output(shim, "two") as two:
                await shim.run("c1", stdout=one.path, options=with_criu(criu))
                last = await one.more()
                before = await _told_by_exec(shim, "c1", look)
                mounts = _driver_mounts_in((await shim.call("State", id="c1")).pid)
                assert any("libcuda.so." in mount and " ro," in mount for mount in mounts)
                await shim.call("Checkpoint", id="c1", path=saved, options=checkpointing(exit=True))
                await shim.reap("c1")
                bundle = shim.bundle("c2", "sh", "-c", COUNT, **asks)
                await shim.create("c2", stdout=two.path, options=with_criu(criu), checkpoint=saved)
                assert "nvidia.json" in os.listdir(bundle)
                pid = (await shim.call("Start", id="c2")).pid
                assert await two.more() > last
                assert _driver_mounts_in(pid) == mounts
                assert await _told_by_exec(shim, "c2", look) == before
                await shim.end("c2")
                # The driver is updated while the container waits to be restored.
                shim.bundle("c3", "sh", "-c", COUNT, **asks)
                await shim.create("c3", options=with_criu(criu), checkpoint=saved)
                changed_node(node, replace(node.scenario, driver="550.54.14"))
                status, message = await refusal(shim, "Start", id="c3")
                assert status == Status.FAILED_PRECONDITION
                assert "NVSHIM-E0140" in message
                assert await shim.status("c3") == "CREATED"
                await shim.call("Delete", id="c3")
            assert shim.leftovers() == [f"socket {shim.socket_path}", f"process {shim.pid}"]


async def test_hooks_of_an_engines_cdi_spec_run_neither_before_nor_after_a_restore(
    start_shim: StartShim, criu: str, tmp_path: Path, two_gpus: SimulatedNode
) -> None:
    saved, look = str(tmp_path / "saved"), "probe dlopen libcuda.so libcuda.so.1"
    program, log = trap(tmp_path)

    def applied(shim: ShimByHand, name: str) -> None:
        """Apply the engine's edits to a container whose bundle already exists."""
        with open(f"{shim.directory}/{name}/config.json", encoding="utf-8") as file:
            spec = json.load(file)
        engine_cdi.apply(spec, two_gpus, program)
        shim.write_spec(name, spec)

    asks: dict[str, Any] = {"image": glibc()}
    environment = {"NVSHIM_CONFIG": two_gpus.config_path}
    async with start_shim("c1", "sh", "-c", COUNT, environment=environment, **asks) as shim:
        with Output(shim, "one") as one, Output(shim, "two") as two:
            applied(shim, "c1")
            await shim.run("c1", stdout=one.path, options=with_criu(criu))
            last = await one.more()
            before = await _told_by_exec(shim, "c1", look)
            assert before.count("libcuda") == 4
            await shim.call("Checkpoint", id="c1", path=saved, options=checkpointing(exit=True))
            await shim.reap("c1")
            shim.bundle("c2", "sh", "-c", COUNT, **asks)
            applied(shim, "c2")
            await shim.create("c2", stdout=two.path, options=with_criu(criu), checkpoint=saved)
            await shim.call("Start", id="c2")
            assert await two.more() > last
            assert await _told_by_exec(shim, "c2", look) == before
            await shim.end("c2")
    assert not log.exists()


async def test_checkpoint_that_a_runtime_made_by_itself_is_restored(
    start_shim: StartShim, criu: str, tmp_path: Path
) -> None:
    """As of containerd's own shim: our fifo was a pipe there."""
    saved, root = str(tmp_path / "saved"), str(tmp_path / "root")
    async with start_shim("c1", "sh", "-c", COUNT) as shim:
        # runc only borrows the first bundle.
        runc = ["runc", "--root", root]
        reading, writing = os.pipe()
        run = [*runc, "run", "--detach", "--bundle", f"{shim.directory}/c1", "other"]
        try:
            await anyio.run_process(run, stdin=subprocess.DEVNULL, stdout=writing, stderr=writing)
            assert os.read(reading, 1) == b"1"
            await anyio.run_process(
                [*runc, "checkpoint", "--image-path", saved, "--work-path", saved, "other"],
                env={"PATH": f"{os.path.dirname(criu)}:{os.environ['PATH']}"},
            )
        finally:
            await anyio.run_process([*runc, "delete", "--force", "other"], check=False)
            for fd in (reading, writing):
                os.close(fd)
        with Output(shim, "two") as two:
            shim.bundle("c2", "sh", "-c", COUNT)
            await shim.create("c2", stdout=two.path, options=with_criu(criu), checkpoint=saved)
            await shim.call("Start", id="c2")
            await two.more()
            assert two.numbers[0] > 1
            await shim.call("Kill", id="c2", signal=signal.SIGTERM)
            assert await shim.reap("c2") == 7


async def test_restored_container_of_a_pod_gets_what_the_kubelet_gave_it_and_no_more(
    start_shim: StartShim, tmp_path: Path, own_gpus: SimulatedNode
) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "inventory.img").write_bytes(bytes.fromhex("16313158"))
    (saved / "descriptors.json").write_text("[]")
    kubelet = KubeletRoot(f"{tmp_path}/kubelet")
    kubelet.set_in(own_gpus.config_path)
    uuid = own_gpus.scenario.gpus[1].uuid
    environment = {"NVSHIM_CONFIG": own_gpus.config_path}
    async with start_shim("c1", "true", environment=environment) as shim:
        spec = shim.spec("c1")
        spec["process"]["env"].append(f"NVIDIA_VISIBLE_DEVICES={uuid}")
        spec["annotations"] = {
            "io.kubernetes.cri.sandbox-uid": "1-2",
            "io.kubernetes.cri.container-name": "main",
            "io.kubernetes.cri.sandbox-id": "c1",
        }
        for given in (False, True):
            shim.write_spec("c1", spec)
            if given:
                answer = ContainerAllocateResponse(envs={"NVIDIA_VISIBLE_DEVICES": uuid})
                kubelet.record("1-2", "main", answer)
            await shim.create("c1", checkpoint=str(saved))
            nodes = [node["path"] for node in shim.spec("c1")["linux"].get("devices") or ()]
            assert ("/dev/nvidia1" in nodes) is given
            assert "/dev/nvidia0" not in nodes
            await shim.call("Delete", id="c1")
