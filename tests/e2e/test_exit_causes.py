"""Why a GPU container exited: its message, its log, its exit code, and what is kept."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from integration.simulated import Scenario, SimulatedNode
from shim import syscalls
from shim.pod.causes import LOOKING
from tests.harness.failing import FailingNode, MessageFile
from tests.harness.fuse import FILE, fuse
from tests.harness.nvshim import nvshim
from tests.harness.runtime import Container, Runtime, new_name, one_line
from tests.harness.waiting import eventually

ON_GPU_0: Final = ("--env", "NVIDIA_VISIBLE_DEVICES=0")
WISH: Final = "io.containerd.nvidia.v1.fault-exit-code"
AS_85: Final = ("--annotation", f"{WISH}=85")
KILLED: Final = 137

DEVICE: Final = re.compile(
    r"GPU failure: Xid 79 \(GPU has fallen off the bus\) on GPU-[0-9a-f]{4}… at [0-9:]{8}, "
    r"\d+\.\d s before exit\. Not the application's fault\. Node \S+ needs a reboot\."
)
WILD: Final = (
    "GPU error: Xid 31 (memory page fault) by this process: an illegal address in a kernel. "
    "Likely the application."
)


@pytest.fixture(scope="module")
def node_that_fails(workshop: str) -> Iterator[SimulatedNode]:
    with SimulatedNode.create(f"{workshop}/failing", Scenario.load("two")) as node:
        yield node


@pytest.fixture
def failing(
    ours: Runtime, node_that_fails: SimulatedNode, configure: Callable[..., None]
) -> Iterator[FailingNode]:
    """Return a node whose GPUs fail, with no stored exits."""
    configure(node=node_that_fails)
    yield FailingNode(node_that_fails, ours.containerd.namespace)
    remembered = f"{node_that_fails.state}/ended"
    if os.path.isfile(remembered):
        os.unlink(remembered)


@pytest.fixture
def message(tmp_path: Path) -> MessageFile:
    """Return the file that a kubelet mounts at /dev/termination-log, with old content."""
    return MessageFile(str(tmp_path / "kubelet"), "loss is nan\n")


def mounted(message: MessageFile, *options: str) -> tuple[str, ...]:
    words = ":".join(("rbind", *(options or ("rw",))))
    mount = f"type=bind,src={message.path},dst=/dev/termination-log,options={words}"
    return ("--mount", mount)


def ended(failing: FailingNode, container: Container) -> dict[str, Any] | None:
    """Return the stored exit of a container."""
    path = f"{failing.node.state}/ended/{container.runtime.containerd.namespace}"
    try:
        with open(f"{path}/{container.name}.json", encoding="utf-8") as file:
            found: dict[str, Any] = json.load(file)
    except FileNotFoundError:
        return None
    return found


def remembered(failing: FailingNode, container: Container) -> dict[str, Any]:
    """Return the stored exit of a stopped container; it is written with the exit event."""
    found = eventually(lambda: ended(failing, container), "its end is remembered")
    assert found is not None
    return found


def end(container: Container) -> int:
    container.kill()
    return container.exit_code()


# -- from the agent's records -------------------------------------------------------------------


def test_a_fault_of_the_device_is_told_everywhere(
    ours: Runtime, failing: FailingNode, message: MessageFile
) -> None:
    container = ours.start_idle(flags=(*ON_GPU_0, *mounted(message)))
    with failing.agent():
        failing.tell(container.name, 79, 31)
        assert end(container) == KILLED
    text = message.text
    assert text.startswith("loss is nan\nGPU failure: Xid 79 ")
    assert DEVICE.fullmatch(text.splitlines()[1].replace(", and 1 more", ""))
    assert text.endswith("\n")
    record = ended(failing, container)
    assert record is not None
    assert record["cause"] == text.splitlines()[1]
    assert (record["exit_status"], record["told_status"]) == (KILLED, KILLED)
    assert record["gpus"] == [failing.uuid()]
    assert [fault["code"] for fault in record["faults"]] == [79, 31]
    [line] = [
        x for x in ours.containerd.log().splitlines() if container.name in x and "Xid 79" in x
    ]
    for word in ("code=79", "whose=device", "sure=true", f"gpu={failing.uuid()}"):
        assert word in line
    causes = f"{failing.node.state}/causes/{ours.containerd.namespace}"
    assert f"{container.name}.json" not in os.listdir(causes), "it was deleted"


def test_the_line_is_the_last_of_stderr(ours: Runtime, failing: FailingNode) -> None:
    script = "echo mine >&2; echo out; sleep 1000"
    container, ctr = ours.spawn(
        "sh", "-c", script, flags=ON_GPU_0, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    eventually(lambda: container.status == "RUNNING", "it runs")
    container.wait_for_program("sleep")
    with failing.agent():
        failing.tell(container.name, 31)
        container.kill()
        out, err = ctr.communicate(timeout=30)
    assert ctr.returncode == KILLED
    assert out.decode() == "out\n"
    assert err.decode().splitlines() == ["mine", f"nvshim: {WILD}"]


@pytest.mark.parametrize("where", ["annotation", "configuration"])
def test_a_fault_of_the_device_changes_the_exit_code_if_asked(
    ours: Runtime,
    failing: FailingNode,
    message: MessageFile,
    configure: Callable[..., None],
    where: str,
) -> None:
    flags: tuple[str, ...] = AS_85
    if where == "configuration":
        flags = ()
        with open(failing.node.config_path, encoding="utf-8") as file:
            text = file.read().replace("[node]\n", "[node]\nfault-exit-code = 85\n")
        configure(text)
    container = ours.start_idle(flags=(*ON_GPU_0, *flags, *mounted(message)))
    failing.tell(container.name, 79)
    assert end(container) == 85
    assert message.text.endswith("needs a reboot. The exit code was 137.\n")
    record = ended(failing, container)
    assert record is not None
    assert (record["exit_status"], record["told_status"]) == (KILLED, 85)


def test_the_exit_code_stays_if_it_is_0_or_an_execs(
    ours: Runtime, failing: FailingNode, message: MessageFile
) -> None:
    flags = (*ON_GPU_0, *AS_85, *mounted(message))
    container = ours.start("sh", "-c", "while [ ! -e /stop ]; do sleep 0.1; done", flags=flags)
    failing.tell(container.name, 79)
    assert container.exec("sh", "-c", "exit 3").code == 3
    assert container.exec("touch", "/stop").code == 0
    assert container.exit_code() == 0
    assert message.text == "loss is nan\n"
    assert ended(failing, container) is None, "it did not fail"


def test_a_wish_that_is_no_exit_code_is_an_error_at_create(
    ours: Runtime, failing: FailingNode
) -> None:
    done = ours.run("true", flags=(*ON_GPU_0, "--annotation", f"{WISH}=0x55"))
    assert done.code != 0
    assert "NVSHIM-E0230" in one_line(done)
    without = ours.run("true", flags=("--annotation", f"{WISH}=0x55"))
    assert without.code == 0, "a container without GPUs is not looked at"


def test_a_container_without_gpus_is_told_nothing(
    ours: Runtime, failing: FailingNode, message: MessageFile
) -> None:
    container = ours.start_idle(flags=(*AS_85, *mounted(message)))
    failing.tell(container.name, 79)
    assert end(container) == KILLED
    assert message.text == "loss is nan\n"


# -- from the kernel's log -----------------------------------------------------------------------


def test_without_an_agent_the_kernels_log_is_read(
    ours: Runtime, failing: FailingNode, message: MessageFile
) -> None:
    container = ours.start_idle(flags=(*ON_GPU_0, *AS_85, *mounted(message)))
    lines = [failing.xid(79, index=1), failing.xid(79, "GPU has fallen off the bus.")]
    with failing.kernel_log(*lines):
        assert end(container) == KILLED, "the log's evidence is not certain"
    [_, told] = message.text.splitlines()
    assert re.match(r"GPU failure: Xid 79 .*Probably not the application's fault\.", told)
    record = ended(failing, container)
    assert record is not None
    assert [fault["source"] for fault in record["faults"]] == ["kernel log"], "of its own GPU alone"


def test_the_process_that_the_log_names_may_be_its_init(
    ours: Runtime, failing: FailingNode, message: MessageFile
) -> None:
    container = ours.start_idle(flags=(*ON_GPU_0, *mounted(message)))
    others = [failing.xid(31, pid=1), failing.xid(45, pid=container.pid)]
    with failing.kernel_log(*others, failing.xid(31, "MMU Fault", pid=container.pid)):
        end(container)
    assert message.text.splitlines()[1:] == [WILD]


def test_a_container_that_writes_to_the_kernels_own_log_does_not_count(
    ours: Runtime, failing: FailingNode, message: MessageFile
) -> None:
    # The real log, at the node's usual path.
    node = f"{failing.node.dev}/kmsg"
    try:
        os.close(os.open("/dev/kmsg", os.O_WRONLY))
        os.mknod(node, 0o20600, os.makedev(1, 11))
    except OSError as error:
        pytest.skip(f"/dev/kmsg: {error.strerror}")
    try:
        line = failing.xid(79, "written by a test of containerd-shim-nvidia")
        script = f"echo '<2>{line}' >/dev/kmsg && exit 3"
        device = ("--device", "/dev/kmsg")
        container = ours.start(
            "sh", "-c", script, flags=(*ON_GPU_0, *AS_85, *device, *mounted(message))
        )
        assert container.exit_code() == 3
    finally:
        os.unlink(node)
    assert message.text == "loss is nan\n"
    assert remembered(failing, container)["faults"] == []


# -- after the end -----------------------------------------------------------------------------


# -- a hostile image, a full disk --------------------------------------------------------------


def test_a_message_file_that_was_replaced_by_a_link_is_not_written_to(
    ours: Runtime, failing: FailingNode, message: MessageFile, tmp_path: Path
) -> None:
    """The container also mounts the directory of its message as a volume, and replaces the file."""
    victim = tmp_path / "victim"
    victim.write_text("of the host\n")
    volume = f"type=bind,src={message.directory},dst=/v,options=rbind:rw"
    script = f"mv /v/0a1b2c3d /v/aside; ln -s {victim} /v/0a1b2c3d; touch /v/done; sleep 1000"
    container = ours.start(
        "sh", "-c", script, flags=(*ON_GPU_0, *AS_85, "--mount", volume, *mounted(message))
    )
    eventually(lambda: os.path.exists(f"{message.directory}/done"), "it is replaced")
    failing.tell(container.name, 79)
    assert end(container) == 85, "the rest is as it should be"
    assert victim.read_text() == "of the host\n"
    assert ended(failing, container) is not None
    assert "termination" in ours.containerd.log() or message.path in ours.containerd.log()


def test_a_mount_that_is_read_only_is_not_written_to(
    ours: Runtime, failing: FailingNode, message: MessageFile
) -> None:
    container = ours.start_idle(flags=(*ON_GPU_0, *mounted(message, "ro")))
    failing.tell(container.name, 79)
    end(container)
    assert message.text == "loss is nan\n"


def test_a_file_system_that_hangs_does_not_hold_the_exit(
    ours: Runtime, failing: FailingNode, message: MessageFile, tmp_path: Path
) -> None:
    content = tmp_path / "content"
    content.write_text("mine\n")
    with fuse(str(tmp_path / "fuse"), str(content)) as server, ExitStack() as mounts:
        syscalls.mount(f"{server.mount_point}/{FILE}", message.path, "", syscalls.MS_BIND)
        mounts.callback(syscalls.umount, message.path)
        container = ours.start_idle(flags=(*ON_GPU_0, *mounted(message)))
        failing.tell(container.name, 79)
        server.hang()
        container.kill()
        container.wait_for("STOPPED", timeout=LOOKING + 10)
        assert server.asked.is_set()
        server.go_on()
        assert container.exit_code() == KILLED
    assert content.read_text() == "mine\n"
    assert "the cause of an exit was not found in time" in ours.containerd.log()


def test_a_state_that_cannot_be_written_changes_nothing_else(
    ours: Runtime, failing: FailingNode, message: MessageFile
) -> None:
    container = ours.start_idle(flags=(*ON_GPU_0, *AS_85, *mounted(message)))
    failing.tell(container.name, 79)
    shutil.rmtree(f"{failing.node.state}/ended", ignore_errors=True)
    Path(failing.node.state, "ended").write_text("no directory")
    assert end(container) == 85
    assert DEVICE.match(message.text.splitlines()[1])


# -- the commands ---------------------------------------------------------------------------


def ask(failing: FailingNode, *words: str) -> str:
    return nvshim(*words, "--config", failing.node.config_path).stdout


def test_explain_and_ps_have_the_cause_of_a_stopped_container(
    ours: Runtime, failing: FailingNode
) -> None:
    name = new_name()
    states = ("--containerd-state", f"{ours.containerd.directory}/state")
    container = ours.start("sleep", "1000", name=name, flags=(*ON_GPU_0, *AS_85))
    failing.tell(name, 79)
    assert "ended" not in ask(failing, "explain", name, *states)
    container.kill()
    container.wait_for("STOPPED")
    told = ask(failing, "explain", name, *states)
    assert len(told.splitlines()) <= 10
    words = " ".join(told.split())
    assert "it is not running" in words
    assert "exit code 137, told as 85" in words
    assert "Xid 79 (GPU has fallen off the bus)" in words
    record = ended(failing, container)
    assert record is not None
    rows = json.loads(ask(failing, "ps", "-o", "json", *states))["items"]
    [served] = [each for row in rows for each in row["containers"] if each["id"] == name]
    assert served["cause"] == record["cause"]
    assert record["cause"] in " ".join(ask(failing, "ps", "-o", "wide", *states).split())
    container.remove()
    # Another container with that name is unaffected.
    again = ours.start("sleep", "1000", name=name, flags=ON_GPU_0)
    again.kill()
    again.wait_for("STOPPED")
    assert "Xid" not in ask(failing, "explain", name, *states)
