"""MPS on a simulated node: the driver's own control daemon survives agents and failures.

Without a GPU the daemon cannot keep a server running. Where clients matter, a program replaces it
that answers like the control program (:data:`STAND_IN`).
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from integration.containers.procfs import Procfs
from integration.node.services.mps import host_setup
from integration.simulated import Scenario, SimulatedNode
from tests.harness.mps_agent import PROGRAM, RESOURCE, STEPS, Agent, agent_of
from tests.harness.runtime import is_alive
from tests.harness.waiting import eventually
from tools.images import glibc_libraries

if TYPE_CHECKING:
    from collections.abc import Iterator

LOADERS: Final = {
    "x86_64": "/lib64/ld-linux-x86-64.so.2",
    "aarch64": "/lib/ld-linux-aarch64.so.1",
}
NEEDED: Final = ("libc.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1")


@pytest.fixture(scope="module")
def node(workshop: str) -> Iterator[SimulatedNode]:
    with SimulatedNode.create(f"{workshop}/mps", Scenario.load("two")) as node:
        yield node


@pytest.fixture
def agent(node: SimulatedNode, tmp_path: Path) -> Iterator[Agent]:
    with agent_of(node, tmp_path) as agent:
        yield agent


@contextmanager
def another_program(agent: Agent, text: str) -> Iterator[None]:
    """Replace the driver's own control program."""
    program = f"{agent.node.driver_root}/{PROGRAM}"
    os.rename(program, f"{program}.own")
    try:
        with open(program, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(program, 0o755)
        yield
    finally:
        os.rename(f"{program}.own", program)


def ask(agent: Agent, command: str) -> str:
    """Return the answer to a control command, as an operator would type it."""
    done = subprocess.run(
        [f"{agent.node.driver_root}/{PROGRAM}"],
        input=command, capture_output=True, text=True, check=True, timeout=60,
        env={"CUDA_MPS_PIPE_DIRECTORY": f"{agent.directory}/pipe"},
    )  # fmt: skip
    return done.stdout.strip()


def mode_of(path: Path) -> str:
    return oct(path.stat().st_mode & 0o7777)


@contextmanager
def in_a_cpuset(agent: Agent) -> Iterator[None]:
    """Run an agent in its own cpuset, like a pod's."""
    tops = [top for top, has_cpusets in host_setup.cgroup_tops().items() if has_cpusets]
    paths = [Path(top, f"mps-test-{os.getpid()}") for top in tops]
    assert agent.process is not None
    for path in paths:
        path.mkdir()
        for name in ("cpuset.cpus", "cpuset.mems"):
            (path / name).write_text((path.parent / name).read_text())
        (path / "cgroup.procs").write_text(str(agent.process.pid))
    try:
        yield
    finally:
        for path in paths:
            for pid in (path / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    (path.parent / "cgroup.procs").write_text(pid)
            path.rmdir()


def nothing_is_left(agent: Agent) -> None:
    assert agent.processes() == []
    assert agent.modes() == ["0", "0"]
    assert not os.path.ismount(agent.root / "shm")
    assert sorted(each.name for each in agent.directory.iterdir()) == ["log", "pipe"]
    assert list((agent.directory / "pipe").iterdir()) == []
    assert not (agent.root / ".ready").exists()


def its_first_life(agent: Agent, first: int) -> None:
    assert ask(agent, "get_default_active_thread_percentage") == "25.0"
    for number, gpu in enumerate(agent.node.scenario.gpus):
        limit = f"set_default_device_pinned_mem_limit {number} {gpu.model.memory // 4}M"
        assert f"Cmd:{limit}\n" in (agent.directory / "log/control.log").read_text()
    assert agent.modes() == ["3", "3"]
    with open(f"/proc/{first}/environ", encoding="utf-8") as file:
        environment = dict(word.split("=", 1) for word in file.read().split("\0") if word)
    uuids = [gpu.uuid for gpu in agent.node.scenario.gpus]
    assert environment["CUDA_VISIBLE_DEVICES"].split(",") == uuids
    assert agent.daemon()["devices"] == uuids
    # It shares its memory with its clients, and not with the host.
    shm = os.stat(agent.root / "shm")
    assert shm.st_dev == os.stat(f"/proc/{first}/root/dev/shm").st_dev != os.stat("/dev/shm").st_dev
    assert mode_of(agent.root / "shm") == "0o1777"
    assert mode_of(agent.directory / "pipe") == "0o755"
    assert mode_of(agent.directory / "log") == "0o700"

    # It is not in the agent's cgroup, whose processes may be killed when the agent stops.
    with open(f"/proc/{first}/cgroup", encoding="utf-8") as file:
        groups = [line.strip().split(":") for line in file]
    for _, kind, path in groups:
        assert path == ("/" if "cpuset" in kind else f"/{host_setup.CGROUP}"), kind


def test_a_daemon_lives_with_its_limits_through_the_agents_that_keep_it(agent: Agent) -> None:
    agent.start(replicas=4)
    with in_a_cpuset(agent):
        first = agent.ready()
        its_first_life(agent, first)
        # The agent is killed; the daemon keeps running.
        agent.end(signal.SIGKILL)

    # The next agent adopts it, with new limits.
    agent.start(replicas=2)
    assert agent.ready() == first
    assert ask(agent, "get_default_active_thread_percentage") == "50.0"

    # The daemon is killed: the agent reports it, and starts another one.
    os.kill(first, signal.SIGKILL)
    second = eventually(lambda: agent.ready() != first and agent.ready(), "another daemon")
    assert not is_alive(first)
    assert agent.processes() == [second]
    assert ask(agent, "get_default_active_thread_percentage") == "50.0"
    assert any("it ended" in line["faults"].get("mps", "") for line in agent.said())
    assert not agent.fault()
    assert agent.daemon()["restarts"] == 1

    # The next agent detects a daemon that does not answer, and replaces it.
    agent.end(signal.SIGKILL)
    os.kill(second, signal.SIGSTOP)
    agent.start(replicas=2, timeout=2)  # long enough for the third daemon on a busy machine
    third = agent.ready()
    assert third != second
    assert not is_alive(second)

    assert agent.end() == 0
    nothing_is_left(agent)


def test_an_agent_killed_after_any_step_leaves_what_the_next_one_mends(agent: Agent) -> None:
    for steps in range(1, len(STEPS) + 1):
        agent.start(dies=steps)
        assert agent.process is not None
        assert agent.process.wait(60) == -signal.SIGKILL, STEPS[steps - 1]
        if STEPS[steps - 1][1] == "posix_spawn":
            # The killed agent did not record the daemon; the next agent adopts it.
            (pid,) = eventually(agent.processes, "a daemon")
            agent.start()
            assert agent.ready() == pid
            assert agent.processes() == [pid]
            assert ask(agent, "get_default_active_thread_percentage") == "25.0"
            assert agent.modes() == ["3", "3"]
            agent.end(signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: not agent.processes(), "it has exited")
    # The next agent stops the daemon of a resource that is no longer shared.
    assert agent.modes() == ["3", "3"]
    agent.start(replicas=0)
    eventually(lambda: agent.modes() == ["0", "0"], "compute modes are set back")
    eventually(lambda: not os.path.ismount(agent.root / "shm"), "all is gone")
    nothing_is_left(agent)


def test_a_driver_root_with_a_loader_is_the_daemons_root(
    agent: Agent, request: pytest.FixtureRequest
) -> None:
    root = agent.node.driver_root
    loader = LOADERS[platform.machine()]
    host = os.path.dirname(glibc_libraries()[0])
    (libcuda,) = Path(root).glob("usr/lib/*/libcuda.so.1")
    copies = {loader: root + loader}
    copies |= {f"{host}/{name}": str(libcuda.with_name(name)) for name in NEEDED}
    for source, copy in copies.items():
        os.makedirs(os.path.dirname(copy), exist_ok=True)
        shutil.copy(source, copy)
        request.addfinalizer(partial(os.unlink, copy))
    agent.start()
    pid = agent.ready()
    assert os.readlink(f"/proc/{pid}/root") == root
    assert os.stat(f"/proc/{pid}/root/dev/shm").st_dev == os.stat(agent.root / "shm").st_dev
    # Only the daemon sees the mounts in that root.
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        assert root not in file.read()
    assert agent.end() == 0
    nothing_is_left(agent)


def test_what_cannot_be_is_said_and_tried_again(agent: Agent) -> None:
    # The agent does not touch a daemon that it has not started.
    pipe = agent.directory / "pipe"
    pipe.mkdir(parents=True)
    argv = [f"{agent.node.driver_root}/{PROGRAM}", "-f"]
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(agent.root)}
    with (
        subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL) as stranger,
        ExitStack() as callbacks,
    ):
        callbacks.callback(stranger.kill)
        control = str(pipe / "control")
        eventually(
            lambda: control in Procfs().listening(stranger.pid), "the foreign daemon listens"
        )
        agent.start()
        eventually(lambda: "NVSHIM-E2739" in agent.fault(), "it is reported")
        assert "another program serves" in agent.daemon()["unready"]
        assert agent.processes() == [stranger.pid]
        assert ask(agent, "get_default_active_thread_percentage") == "100.0"
        # The foreign daemon also survives the agent's exit.
        assert agent.end() == 0
        assert ask(agent, "quit") == ""
    shutil.rmtree(agent.root)
    # The agent's exit does not wait for a daemon that does not start.
    with another_program(agent, "#!/bin/sh\nexec /bin/sleep 1000\n"):
        agent.start()
        eventually(agent.processes, "a program that does not become a daemon")
        assert agent.end() == 0
    nothing_is_left(agent)
    with open(f"{agent.node.state}/nvml-faults", "w", encoding="utf-8") as file:
        file.write("nvmlDeviceSetComputeMode=error:4\n")
    agent.start()
    eventually(lambda: "NVSHIM-E2740" in agent.fault(), "it is reported")
    assert agent.processes() == []
    assert "Permission" in agent.daemon()["unready"]
    with another_program(agent, "#!/bin/sh\necho 'the driver is out of sorts'\nexit 3\n"):
        os.unlink(f"{agent.node.state}/nvml-faults")  # the agent retries all the time
        eventually(lambda: "NVSHIM-E2738" in agent.fault(), "it is reported")
        assert "status 3: the driver is out of sorts" in agent.fault()
    agent.ready()
    assert not agent.fault()


STAND_IN: Final = r"""#!/usr/bin/python3 -IS
# Answers like nvidia-cuda-mps-control. Its clients are the lines of the file "clients" in the log
# directory; a server lives as long as the daemon, and longer if that is killed. A stopped daemon
# does not answer.
import os, sys, time
pipe, log = (os.environ[f"CUDA_MPS_{name}_DIRECTORY"] for name in ("PIPE", "LOG"))
def read(path):
    try:
        with open(path) as file:
            return file.read()
    except FileNotFoundError:
        return ""
def write(name, text):
    with open(f"{pipe}/{name}", "w") as file:
        file.write(text)
def lives():
    try:
        return not os.kill(int(read(f"{pipe}/control")), 0)
    except (OSError, ValueError):
        return False
def is_stopped():
    return read(f"/proc/{read(f'{pipe}/control')}/stat").rpartition(")")[2].split()[:1] == ["T"]
clients = lambda: read(f"{log}/clients").split()
if sys.argv[1:] == ["-f"]:
    server = os.fork() or os.execv("/bin/sleep", ["sleep", "1000"])
    write("server", str(server))
    write("percentage", "100.0")
    write("control", str(os.getpid()))
    while not os.path.exists(f"{pipe}/quit") or clients():
        time.sleep(0.02)
    os.kill(server, 9)
    os.wait()
    os.unlink(f"{pipe}/control")
    sys.exit(0)
for line in sys.stdin:
    name, *words = line.split()
    if not lives():
        sys.exit(1)
    while is_stopped():
        time.sleep(0.02)
    if name == "get_default_active_thread_percentage":
        print(read(f"{pipe}/percentage"))
    elif name == "set_default_active_thread_percentage":
        write("percentage", words[0])
    elif name == "set_default_device_pinned_mem_limit":
        write(f"limit-{words[0]}", words[1])
    elif name == "get_default_device_pinned_mem_limit":
        print(read(f"{pipe}/limit-{words[0]}"))
    elif name == "get_server_list":
        print(read(f"{pipe}/server"))
    elif name == "get_client_list":
        print("\n".join(clients()))
    elif name == "quit":
        write("quit", "")
        while lives():
            time.sleep(0.02)
"""


@pytest.fixture
def stand_in(agent: Agent) -> Iterator[Agent]:
    with another_program(agent, STAND_IN):
        yield agent


def bundle(agent: Agent, **spec: Any) -> Path:
    """Create a container with the daemon's pipes, as containerd stores it."""
    path = agent.states / "io.containerd.runtime.v2.task/k8s.io/cuda-1"
    path.mkdir(parents=True)
    mounts = [{"destination": "/mps/nvidia.com/gpu/pipe", "source": f"{agent.directory}/pipe"}]
    (path / "config.json").write_text(json.dumps({"ociVersion": "1.0.2", "mounts": mounts} | spec))
    return path


def test_clients_outlive_agents_and_a_sharing_that_is_no_more(stand_in: Agent) -> None:
    agent = stand_in
    agent.start()
    pid = agent.ready()
    clients = agent.directory / "log/clients"
    clients.write_text("4242\n")
    assert agent.end() == 0
    assert is_alive(pid)
    assert agent.modes() == ["3", "3"]
    # Sharing is disabled: the daemon waits for its client, and the agent reports it.
    container = bundle(agent)
    agent.start(replicas=0, timeout=0.5)
    eventually(lambda: "cuda-1" in agent.fault(), "the remaining clients are reported")
    assert is_alive(pid)
    assert agent.daemon()["unready"]
    clients.unlink()
    eventually(lambda: not is_alive(pid), "it exits with its last client")
    shutil.rmtree(container)
    eventually(lambda: not os.path.ismount(agent.root / "shm"), "all is gone")
    nothing_is_left(agent)
    assert all(each["unready"] for line in agent.said() for each in line["mps"].values())


def test_a_container_that_may_become_a_client_keeps_the_daemon(stand_in: Agent) -> None:
    agent = stand_in
    agent.start()
    pid = agent.ready()
    container = bundle(agent)
    assert agent.end() == 0
    assert is_alive(pid)
    # The daemon dies, its server survives: no new daemon while a container may use the server.
    agent.start()
    assert agent.ready() == pid
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: "may have clients in cuda-1" in agent.fault(), "it is reported")
    (server,) = agent.processes()
    assert agent.daemon()["unready"]
    shutil.rmtree(container)
    died, pid = pid, agent.ready()
    assert pid != died
    assert not is_alive(server)
    # The agent kills a hanging daemon that is no longer needed, and its server.
    agent.end(signal.SIGKILL)
    os.kill(pid, signal.SIGSTOP)
    agent.start(replicas=0, timeout=0.5)
    eventually(lambda: not os.path.ismount(agent.root / "shm"), "all is gone")
    nothing_is_left(agent)


@contextmanager
def foreign_container(agent: Agent, place: Path) -> Iterator[int]:
    """Yield the pid of a process with the daemon's pipes, as in a container of Docker or CRI-O.

    Only the kernel's mount table shows it.
    """
    place.mkdir()
    script = f"mount --bind {agent.directory}/pipe {place} && exec sleep 1000"
    with subprocess.Popen(["unshare", "--mount", "sh", "-c", script]) as process:
        try:
            comm = Path(f"/proc/{process.pid}/comm")
            eventually(lambda: comm.read_text() == "sleep\n", "it is there")
            yield process.pid
        finally:
            process.kill()


def test_a_silent_daemon_is_not_ended_under_clients_of_another_engine(
    stand_in: Agent, tmp_path: Path
) -> None:
    agent = stand_in
    agent.start()
    pid = agent.ready()
    with foreign_container(agent, tmp_path / "pipe") as client:
        os.kill(pid, signal.SIGSTOP)
        agent.end(signal.SIGKILL)
        # The next agent still needs the daemon, which does not answer.
        agent.start(timeout=0.5)
        eventually(lambda: f"may have clients in process {client} (sleep)" in agent.fault(), "why")
        assert is_alive(pid)
        os.kill(pid, signal.SIGCONT)
        assert agent.ready() == pid
        # Sharing is disabled, and the daemon is silent again.
        agent.end(signal.SIGKILL)
        os.kill(pid, signal.SIGSTOP)
        agent.start(replicas=0, timeout=0.5)
        eventually(
            lambda: f"process {client} (sleep)" in agent.fault(),
            "the remaining clients are reported",
        )
        assert is_alive(pid)
    eventually(lambda: not is_alive(pid), "the unused daemon stops", timeout=40)
    eventually(lambda: not os.path.ismount(agent.root / "shm"), "all is gone")
    nothing_is_left(agent)


def test_a_gpu_is_of_one_daemon_at_a_time(stand_in: Agent) -> None:
    agent = stand_in
    first, second = (gpu.uuid for gpu in agent.node.scenario.gpus)
    agent.start()
    agent.ready()
    clients = agent.directory / "log/clients"
    clients.write_text("4242\n")
    assert agent.end() == 0
    # Another resource has the GPU now: it waits for the remaining clients.
    agent.start(devices=(first,), timeout=0.5)
    agent.resource = f"{RESOURCE}.shared"
    eventually(
        lambda: f"the daemon of {RESOURCE} still holds its GPUs" in agent.fault(), "it is reported"
    )
    clients.unlink()
    pid = agent.ready()
    assert agent.daemon()["devices"] == [first]
    assert agent.modes() == ["3", "0"]
    # It uses another GPU now.
    agent.end(signal.SIGKILL)
    agent.start(devices=(second,))
    eventually(lambda: agent.daemon().get("devices") == [second], "one with the other GPU")
    assert not is_alive(pid)
    assert agent.modes() == ["0", "3"]
    assert agent.end() == 0
    nothing_is_left(agent)
