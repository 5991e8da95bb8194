"""The shim holds a pod: the Sandbox service, called by hand as containerd 2.x calls it."""

from __future__ import annotations

import functools
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from api import typeurl
from api.errors import Status
from api.proto import cgroups_v1_pb2, cgroups_v2_pb2, pod_pb2, types_pb2
from api.ttrpc import ConnectionClosed, RemoteError
from integration.timeouts import PATIENCE
from tests.harness.runtime import is_alive
from tests.harness.sandbox import NODE, SandboxByHand
from tests.harness.shim import CGROUP, StartShim, content_of, wait_for_file
from tests.harness.waiting import eventually, settled

StartPod = Callable[..., AbstractAsyncContextManager[SandboxByHand]]

pytestmark = pytest.mark.anyio

SLEEP = ("sleep", "1000")


@pytest.fixture
def start_pod(start_shim: StartShim) -> StartPod:
    """Start a shim for a sandbox, and the sandbox."""

    @asynccontextmanager
    async def start(
        environment: dict[str, str] | None = None, **config: Any
    ) -> AsyncIterator[SandboxByHand]:
        async with start_shim("pod", sandbox=True, bootstrap=True, environment=environment) as shim:
            pod = SandboxByHand(shim)
            try:
                await pod.start(**config)
                yield pod
            finally:
                if pod.pid and is_alive(pod.pid):
                    with suppress(ProcessLookupError):
                        pod.kill_holder()

    return start


@pytest.fixture
def node_namespaces() -> dict[str, str]:
    return {name: os.readlink(f"/proc/self/ns/{name}") for name in ("net", "ipc", "uts", "pid")}


@pytest.fixture
def other_network() -> Iterator[str]:
    """The path of a network namespace of its own."""
    node = os.readlink("/proc/self/ns/net")
    with subprocess.Popen(["unshare", "--net", "sleep", "1000"]) as holder:
        path = f"/proc/{holder.pid}/ns/net"
        try:
            eventually(lambda: os.readlink(path) != node, "there is another network")
            yield path
        finally:
            holder.kill()


@pytest.fixture
def by_paths(tmp_path: Path) -> dict[str, str]:
    """The environment of a shim that is to name paths in the place of a process."""
    config = tmp_path / "config.toml"
    config.write_text('[sandbox]\nnamespaces = "paths"\n')
    return {"NVSHIM_CONFIG": str(config)}


def _linux(**namespaces: Any) -> dict[str, Any]:
    return {"security_context": {"namespace_options": namespaces}}


def _users_of(mode: int) -> dict[str, Any]:
    """The configuration of a pod in somebody's user namespace."""
    mapping = {"host_id": 200000, "container_id": 0, "length": 65536}
    users = {"mode": mode, "uids": [mapping], "gids": [mapping]}
    return {"linux": _linux(userns_options=users)}


def _enter(pid: int, *command: str) -> str:
    """What a command of the node prints in the network, IPC and names of a process."""
    return _nsenter("--target", str(pid), "--net", "--ipc", "--uts", *command)


def _nsenter(*words: str) -> str:
    return subprocess.run(["nsenter", *words], capture_output=True, check=True, text=True).stdout


def _until_end(path: str) -> str:
    """The content of a file that ends with the line "end", once it does."""
    seen = wait_for_file(path)
    return seen if seen.endswith("end\n") else ""


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


async def _refused(call: Any) -> RemoteError:
    with pytest.raises(RemoteError) as refused:
        await call
    assert "\n" not in str(refused.value)
    return refused.value


# -- what a pod shares ----------------------------------------------------------------------


async def test_members_share_network_ipc_and_names_and_not_their_processes(
    start_pod: StartPod, node_namespaces: dict[str, str]
) -> None:
    async with start_pod(hostname="web-1", dns_config={"servers": ["10.0.0.10"]}) as pod:
        script = (
            "echo shared > /dev/shm/note; hostname > /name; ipcmk -Q 2>/dev/null; exec sleep 99"
        )
        one = await pod.run("one", "sh", "-c", script)
        two = await pod.run("two", *SLEEP)
        for name in ("net", "ipc", "uts"):
            shared = {pod.namespace(name, pid) for pid in (pod.pid, one, two)}
            assert len(shared) == 1
            assert shared != {node_namespaces[name]}
        assert len({pod.namespace("pid", pid) for pid in (pod.pid, one, two)}) == 3
        root = f"/proc/{two}/root"
        assert wait_for_file(f"/proc/{one}/root/name") == "web-1\n"
        assert content_of(f"{root}/dev/shm/note") == b"shared\n"
        assert content_of(f"{root}/etc/hostname") == b"web-1\n"
        assert content_of(f"{root}/etc/resolv.conf") == b"nameserver 10.0.0.10\n"
        assert content_of(f"{root}/etc/hosts") == content_of("/etc/hosts")
        assert "LOOPBACK,UP" in _enter(two, "ip", "address", "show", "dev", "lo")
        await pod.shim.end("one")
        await pod.shim.end("two")
        await pod.gone()


async def test_what_a_spec_mounts_itself_stays(start_pod: StartPod) -> None:
    async with start_pod() as pod:
        hosts = os.path.join(pod.shim.directory, "hosts")
        _write(hosts, "of the kubelet\n")
        pod.member("one", *SLEEP)
        spec = pod.shim.spec("one")
        spec["mounts"].append(
            {"destination": "/etc/hosts", "type": "bind", "source": hosts, "options": ["bind"]}
        )
        pod.shim.write_spec("one", spec)
        pid = await pod.shim.run("one")
        assert content_of(f"/proc/{pid}/root/etc/hosts") == b"of the kubelet\n"
        await pod.gone()


async def test_a_container_that_joins_nothing_is_left_as_it_is(start_pod: StartPod) -> None:
    async with start_pod() as pod:
        pod.shim.bundle("one", *SLEEP)
        before = pod.shim.spec("one")
        await pod.shim.run("one")
        assert pod.shim.spec("one") == before
        await pod.gone()


async def test_pid_one_of_a_shared_pid_namespace_reaps_and_ignores_its_members(
    start_pod: StartPod,
) -> None:
    async with start_pod() as pod:
        script = """
        kill -9 1; kill -TERM 1
        sh -c '(sleep 0.1; exit 3) & exec true'
        sleep 0.3; while ps -o stat | grep -q Z; do sleep 0.1; done
        ps -o pid,stat,comm > /ps; exec sleep 1000
        """
        shared = "network ipc uts pid"
        one = await pod.run("one", "sh", "-c", script, share=shared)
        two = await pod.run("two", *SLEEP, share=shared)
        assert pod.namespace("pid", one) == pod.namespace("pid", two) == pod.namespace("pid")
        listed = [line.split() for line in wait_for_file(f"/proc/{one}/root/ps").splitlines()]
        # Whoever is nice has another letter behind the first.
        assert ("1", "S", "sandbox") in [(pid, state[0], name) for pid, state, name in listed]
        assert "Z" not in [state[0] for _, state, _ in listed]
        await pod.shim.end("one")
        assert is_alive(two)
        assert await pod.state() == "SANDBOX_READY"
        await pod.gone()


async def test_the_holder_shows_its_pod_nothing(start_pod: StartPod) -> None:
    look = "cat maps mem auxv; for f in root fd cwd map_files; do ls -A $f/; done; readlink exe"
    script = f"cd /proc/1; ({look}; echo end) > /seen 2> /dev/null; sleep 1000"
    async with start_pod() as pod:
        environ = content_of(f"/proc/{pod.pid}/environ")
        assert environ == b""
        assert os.listdir(f"/proc/{pod.pid}/fd") == []
        assert os.listdir(f"/proc/{pod.pid}/root") == ["sandbox"]
        lines = content_of(f"/proc/{pod.pid}/status").decode().splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        assert status["Uid"].split() == ["65535"] * 4
        assert status["Groups"].strip() == ""
        assert (status["CapPrm"], status["CapEff"]) == ("0" * 16, "0" * 16)
        assert (status["Seccomp"], status["NoNewPrivs"]) == ("2", "1")
        assert int(status["VmRSS"].split()[0]) <= 64
        one = await pod.run("one", "sh", "-c", script, share="network ipc uts pid")
        seen = eventually(lambda: _until_end(f"/proc/{one}/root/seen"), "the member has looked")
        assert seen == "end\n"
        await pod.gone()


async def test_who_may_trace_finds_an_empty_root_and_no_way_out(start_pod: StartPod) -> None:
    async with start_pod() as pod:
        script = "(ls -A /proc/1/root; cat /proc/1/environ; echo end) > /seen; sleep 1000"
        pod.member("one", "sh", "-c", script, share="network ipc uts pid")
        spec = pod.shim.spec("one")
        for capabilities in spec["process"]["capabilities"].values():
            capabilities.append("CAP_SYS_PTRACE")
        pod.shim.write_spec("one", spec)
        one = await pod.shim.run("one")
        seen = eventually(lambda: _until_end(f"/proc/{one}/root/seen"), "the member has looked")
        assert seen == "sandbox\nend\n"
        await pod.gone()


async def test_namespaces_of_the_node_when_asked_for(
    start_pod: StartPod, node_namespaces: dict[str, str]
) -> None:
    async with start_pod(linux=_linux(network=NODE, pid=NODE, ipc=NODE), hostname="web-1") as pod:
        assert {name: pod.namespace(name) for name in node_namespaces} == node_namespaces
        status = await pod.call("SandboxStatus")
        assert status.pid == pod.pid
        one = await pod.run("one", *SLEEP)
        assert {name: pod.namespace(name, one) for name in ("net", "ipc", "uts")} == {
            name: node_namespaces[name] for name in ("net", "ipc", "uts")
        }
        await pod.gone()


async def test_the_network_that_containerd_has_made_is_joined(
    start_pod: StartPod, other_network: str
) -> None:
    async with start_pod(netns_path=other_network) as pod:
        assert pod.namespace("net") == os.readlink(other_network)
        await pod.gone()


async def test_sysctls_are_set_in_the_pod_and_not_on_the_node(start_pod: StartPod) -> None:
    asked = {"kernel.shmmax": "123456", "net.ipv4.ip_local_port_range": "30000 40000"}
    before = content_of("/proc/sys/net/ipv4/ip_local_port_range")
    async with start_pod(linux={"sysctls": asked}) as pod:
        names = (*asked, "net.ipv4.ip_unprivileged_port_start", "net.ipv4.ping_group_range")
        values = _enter(pod.pid, "sysctl", "-n", *names).splitlines()
        assert [value.split() for value in values] == [
            ["123456"], ["30000", "40000"], ["0"], ["0", "2147483647"],
        ]  # fmt: skip
        assert content_of("/proc/sys/net/ipv4/ip_local_port_range") == before
        await pod.gone()


async def test_a_holder_is_powerless_also_where_nobody_is_but_root(start_pod: StartPod) -> None:
    mapping = {"host_id": 200000, "container_id": 0, "length": 1}
    users = {"uids": [mapping], "gids": [mapping]}
    async with start_pod(linux=_linux(userns_options=users)) as pod:
        status = content_of(f"/proc/{pod.pid}/status").decode()
        assert "CapEff:\t0000000000000000" in status
        assert "CapPrm:\t0000000000000000" in status
        await pod.gone()


async def test_a_pod_with_a_user_namespace(start_pod: StartPod) -> None:
    mapping = {"host_id": 200000, "container_id": 0, "length": 65536}
    users = {"uids": [mapping], "gids": [mapping]}
    async with start_pod(linux=_linux(userns_options=users), hostname="mapped") as pod:
        assert pod.namespace("user") != os.readlink("/proc/self/ns/user")
        assert content_of(f"/proc/{pod.pid}/uid_map").split() == [b"0", b"200000", b"65536"]
        assert _enter(pod.pid, "hostname") == "mapped\n"
        rootfs = os.path.join(pod.shim.directory, "one", "rootfs")
        pod.member("one", *SLEEP, share="network ipc uts user")
        for path in (pod.shim.directory, os.path.dirname(rootfs)):
            os.chmod(path, 0o711)
        for folder, _, names in os.walk(rootfs):
            for name in (".", *names):
                os.chown(os.path.join(folder, name), 200000, 200000, follow_symlinks=False)
        spec = pod.shim.spec("one")
        oci = {"hostID": 200000, "containerID": 0, "size": 65536}
        spec["linux"].update(uidMappings=[oci], gidMappings=[oci])
        pod.shim.write_spec("one", spec)
        os.chmod(pod.bundle, 0o711)
        one = await pod.shim.run("one")
        assert pod.namespace("user", one) == pod.namespace("user")
        assert content_of(f"/proc/{one}/root/etc/hostname") == b"mapped\n"
        await pod.gone()


# -- its life -------------------------------------------------------------------------------


async def test_status_wait_and_platform_from_the_beginning_to_the_end(
    start_shim: StartShim,
) -> None:
    async with start_shim("pod", sandbox=True) as shim:
        pod = SandboxByHand(shim)
        before = time.time_ns()
        await pod.create()
        status = await pod.call("SandboxStatus")
        assert (status.state, status.pid) == ("SANDBOX_NOTREADY", 0)
        started = await pod.call("StartSandbox")
        pod.pid = started.pid
        assert before <= started.created_at.ToNanoseconds() <= time.time_ns()
        shown = {m["destination"] for m in typeurl.unpack_json(started.spec)["mounts"]}
        assert shown == {"/dev/shm", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf"}
        status = await pod.call("SandboxStatus", verbose=True)
        assert (status.state, status.pid) == ("SANDBOX_READY", pod.pid)
        assert (status.info["state"], status.info["pid"]) == ("SANDBOX_READY", str(pod.pid))
        assert status.created_at == started.created_at
        assert '"processStatus": "running"' in status.info["info"]
        platform = (await pod.call("Platform")).platform
        assert (platform.os, platform.architecture) == ("linux", _go_architecture())
        await pod.call("PingSandbox")
        exits = []

        async def wait() -> None:
            exits.append(await pod.call("WaitSandbox"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.sleep(0.1)
            assert exits == []
            await pod.call("StopSandbox")
        assert exits[0].exit_status == 128 + signal.SIGKILL
        status = await pod.call("SandboxStatus")
        assert status.state == "SANDBOX_NOTREADY"
        assert status.exited_at == exits[0].exited_at
        assert (await pod.call("WaitSandbox")) == exits[0]
        await pod.call("StopSandbox")
        await pod.gone()
        assert shim.events.names == []


async def test_task_shutdown_leaves_a_sandbox_alone(start_pod: StartPod) -> None:
    async with start_pod() as pod:
        await pod.run("one", *SLEEP)
        await pod.shim.end("one")
        await pod.shim.call("Shutdown", id="one")
        await anyio.sleep(0.2)
        assert await pod.state() == "SANDBOX_READY"
        await pod.run("two", *SLEEP)
        await pod.shim.end("two")
        await pod.gone()


async def test_stop_ends_containers_that_still_run_and_tells_it(start_pod: StartPod) -> None:
    async with start_pod() as pod:
        one = await pod.run("one", *SLEEP)
        two = await pod.run("two", *SLEEP, share="network ipc uts pid")
        pod.member("three", *SLEEP)
        await pod.shim.create("three")
        await pod.shim.call("Pause", id="one")
        await pod.call("StopSandbox")
        assert not any(is_alive(pid) for pid in (one, two, pod.pid))
        for name in ("one", "two", "three"):
            assert await pod.shim.status(name) == "STOPPED"
            await pod.shim.call("Delete", id=name)
        await pod.gone()
        assert pod.shim.events.of("two") == ["TaskCreate", "TaskStart", "TaskExit", "TaskDelete"]


async def test_stop_with_a_timeout_asks_first(start_pod: StartPod) -> None:
    async with start_pod() as pod:
        polite = "trap 'exit 5' TERM; echo > /ready; while :; do sleep 0.05; done"
        one = await pod.run("one", "sh", "-c", polite)
        stubborn = "trap '' TERM; echo > /ready; while :; do sleep 0.05; done"
        two = await pod.run("two", "sh", "-c", stubborn)
        for pid in (one, two):
            wait_for_file(f"/proc/{pid}/root/ready")
        began = time.monotonic()
        await pod.call("StopSandbox", timeout_secs=3)
        assert 2.9 < time.monotonic() - began < 9
        assert (await pod.shim.call("Wait", id="one")).exit_status == 5
        assert (await pod.shim.call("Wait", id="two")).exit_status == 128 + 9
        await pod.gone()


async def test_shutdown_takes_all_that_is_left_with_it(start_pod: StartPod) -> None:
    async with start_pod() as pod:
        one = await pod.run("one", *SLEEP)
        await pod.gone()
        assert not is_alive(one)
        assert pod.shim.events.of("one") == ["TaskCreate", "TaskStart", "TaskExit", "TaskDelete"]


@pytest.mark.parametrize("hangs_up", [True, False])
async def test_the_connection_outlasts_the_answer_to_shutdown_until_the_client_hangs_up(
    start_pod: StartPod, *, hangs_up: bool
) -> None:
    async with start_pod() as pod:
        client = pod.shim.client
        await pod.call("ShutdownSandbox")
        with anyio.move_on_after(0.3):
            await client.wait_closed()
        assert not client.closed
        assert is_alive(pod.shim.pid)
        if hangs_up:
            client.close()
        await pod.shim.until_gone()
        assert pod.leftovers() == []


async def test_a_holder_that_is_killed_ends_the_sandbox_and_not_its_members(
    start_pod: StartPod,
) -> None:
    async with start_pod() as pod:
        one = await pod.run("one", *SLEEP)
        two = await pod.run("two", *SLEEP, share="network ipc uts pid")
        pod.kill_holder()
        assert (await pod.call("WaitSandbox")).exit_status == 128 + 9
        status = await pod.call("SandboxStatus")
        assert (status.state, status.pid) == ("SANDBOX_NOTREADY", pod.pid)
        # Its pid namespace is gone, hence also who was in it.
        assert (await pod.shim.call("Wait", id="two")).exit_status == 128 + 9
        assert not is_alive(two)
        assert is_alive(one)
        pod.member("three", *SLEEP)
        refused = await _refused(pod.shim.create("three"))
        assert refused.status == Status.FAILED_PRECONDITION
        assert "NVSHIM-E1603" in str(refused)
        await pod.call("StopSandbox")
        assert not is_alive(one)
        await pod.gone()


async def _metrics(pod: SandboxByHand) -> Any:
    metric = (await pod.call("SandboxMetrics")).metrics
    assert metric.id == "pod"
    v2 = typeurl.full_name(metric.data).endswith("v2.Metrics")
    return typeurl.unpack(metric.data, cgroups_v2_pb2.Metrics if v2 else cgroups_v1_pb2.Metrics)


async def test_metrics_are_those_of_the_whole_pod(start_pod: StartPod) -> None:
    async with start_pod(linux={"cgroup_parent": CGROUP}) as pod:
        await pod.run("one", *SLEEP)
        await pod.run("two", *SLEEP)
        with anyio.fail_after(10 * PATIENCE):
            # What the runtime has left behind counts until it is reaped.
            while (metrics := await _metrics(pod)).pids.current > 2:  # noqa: ASYNC110 - it asks
                await anyio.sleep(0.01)
        assert metrics.pids.current == 2
        assert [interface.name for interface in metrics.network] == ["lo"]
        await pod.gone()


# -- without any process --------------------------------------------------------------------


async def test_namespaces_are_found_by_paths_and_no_process_holds_them(
    start_pod: StartPod, by_paths: dict[str, str], node_namespaces: dict[str, str]
) -> None:
    asked = {"kernel.shmmax": "123456"}
    linux = {"sysctls": asked, "cgroup_parent": CGROUP, **_linux(pid=pod_pb2.CONTAINER)}
    async with start_pod(by_paths, hostname="web-1", linux=linux) as pod:
        assert pod.pid == 0
        assert pod.shim.children() == []
        assert pod.paths == {
            kind: f"{pod.bundle}/ns/{name}"
            for kind, name in (("network", "net"), ("uts", "uts"), ("ipc", "ipc"))
        }
        assert pod.spec["hostname"] == "web-1"
        assert pod.spec["linux"]["sysctl"].items() > asked.items()
        one = await pod.run("one", "sh", "-c", "echo shared > /dev/shm/note; exec sleep 99")
        two = await pod.run("two", *SLEEP)
        for name in ("net", "ipc", "uts"):
            shared = {pod.namespace(name, pid) for pid in (one, two)}
            assert len(shared) == 1
            assert shared != {node_namespaces[name]}
        assert pod.namespace("pid", one) != pod.namespace("pid", two)
        assert wait_for_file(f"/proc/{two}/root/dev/shm/note") == "shared\n"
        assert content_of(f"/proc/{two}/root/etc/hostname") == b"web-1\n"
        assert _enter(two, "sysctl", "-n", "kernel.shmmax") == "123456\n"
        assert "LOOPBACK,UP" in _enter(two, "ip", "address", "show", "dev", "lo")
        status = await pod.call("SandboxStatus")
        assert (status.pid, status.state) == (0, "SANDBOX_READY")
        assert [interface.name for interface in (await _metrics(pod)).network] == ["lo"]
        # The pod outlives its containers, and its namespaces are the same for the next.
        network = pod.namespace("net", one)
        await pod.shim.end("one")
        await pod.shim.end("two")
        assert await pod.state() == "SANDBOX_READY"
        assert pod.namespace("net", await pod.run("three", *SLEEP)) == network
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pod.call, "WaitSandbox")
            await pod.call("StopSandbox")
        assert await pod.state() == "SANDBOX_NOTREADY"
        pod.member("four", *SLEEP)
        assert "NVSHIM-E1603" in str(await _refused(pod.shim.create("four")))
        await pod.gone()


async def test_paths_are_of_what_is_the_pods_own(
    start_pod: StartPod, by_paths: dict[str, str], other_network: str
) -> None:
    own = pod_pb2.CONTAINER
    async with start_pod(by_paths, netns_path=other_network, linux=_linux(pid=own)) as pod:
        assert pod.paths["network"] == other_network
        assert sorted(os.listdir(f"{pod.bundle}/ns")) == ["ipc", "uts"]
        await pod.run("one", *SLEEP)
        await pod.gone()
    async with start_pod(by_paths, linux=_linux(network=NODE, ipc=NODE, pid=own)) as pod:
        assert pod.paths == {}
        await pod.gone()


async def test_containers_that_share_processes_need_one_that_holds_them(
    start_pod: StartPod, by_paths: dict[str, str]
) -> None:
    async with start_pod(by_paths) as pod:
        assert is_alive(pod.pid)
        assert pod.paths["pid"] == f"/proc/{pod.pid}/ns/pid"
        assert not os.path.exists(f"{pod.bundle}/ns")
        await pod.gone()


async def test_user_namespace_is_found_by_a_path(
    start_pod: StartPod, by_paths: dict[str, str]
) -> None:
    linux = _users_of(pod_pb2.POD)["linux"]
    linux["security_context"]["namespace_options"]["pid"] = pod_pb2.CONTAINER
    async with start_pod(by_paths, linux=linux, hostname="mapped") as pod:
        mapped = _nsenter(f"--user={pod.paths['user']}", "cat", "/proc/self/uid_map")
        assert mapped.split() == ["0", "200000", "65536"]
        assert _nsenter(f"--uts={pod.paths['uts']}", "hostname") == "mapped\n"
        await pod.gone()


async def test_namespaces_of_a_killed_shim_end_with_the_clean_up_of_its_sandbox(
    start_pod: StartPod, by_paths: dict[str, str]
) -> None:
    async with start_pod(by_paths, linux=_linux(pid=pod_pb2.CONTAINER)) as pod:
        one = await pod.run("one", *SLEEP)
        os.kill(pod.shim.pid, signal.SIGKILL)
        await pod.shim.until_gone()
        assert is_alive(one)
        assert os.path.exists(pod.paths["ipc"])
        for _ in range(2):
            assert pod.shim.delete_verb("pod") < 4
            assert not is_alive(one)
            assert [left for left in pod.leftovers() if left != "file pod"] == []


# -- what goes wrong ------------------------------------------------------------------------


async def test_requests_for_a_sandbox_that_is_not_there(start_pod: StartPod) -> None:
    async with start_pod() as pod:
        for method in (
            "StartSandbox", "Platform", "StopSandbox", "WaitSandbox", "SandboxStatus",
            "PingSandbox", "ShutdownSandbox", "SandboxMetrics",
        ):  # fmt: skip
            refused = await _refused(pod.call(method, sandbox_id="other"))
            assert refused.status == Status.NOT_FOUND, method
        assert (await _refused(pod.call("SandboxMetrics"))).status == Status.NOT_FOUND
        await pod.gone()


async def test_a_start_before_anything_was_created_is_out_of_order(start_shim: StartShim) -> None:
    async with start_shim("pod", sandbox=True) as shim:
        pod = SandboxByHand(shim)
        refused = await _refused(pod.call("StartSandbox"))
        assert refused.status == Status.FAILED_PRECONDITION
        assert "NVSHIM-E1603" in str(refused)
        # And then all is as if nobody had asked.
        await pod.start()
        await pod.gone()


async def test_a_second_sandbox_is_refused(start_pod: StartPod) -> None:
    async with start_pod() as pod:
        for sandbox_id in ("pod", "other"):
            refused = await _refused(SandboxByHand(pod.shim, sandbox_id).create())
            assert refused.status == Status.ALREADY_EXISTS
        assert (await _refused(pod.call("StartSandbox"))).status == Status.FAILED_PRECONDITION
        assert await pod.state() == "SANDBOX_READY"
        await pod.gone()


async def test_a_shim_whose_sandbox_was_never_made_ends_with_shutdown(
    start_shim: StartShim,
) -> None:
    async with start_shim("pod", sandbox=True) as shim:
        pod = SandboxByHand(shim)
        mount = types_pb2.Mount(type="tmpfs", source="tmpfs")
        refused = await _refused(pod.call("CreateSandbox", rootfs=[mount]))
        assert refused.status == Status.UNIMPLEMENTED
        await pod.gone()


async def test_wait_for_a_sandbox_that_is_never_started_ends_with_it(
    start_shim: StartShim,
) -> None:
    async with start_shim("pod", sandbox=True) as shim:
        pod = SandboxByHand(shim)
        await pod.create()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pod.call, "WaitSandbox")
            await anyio.sleep(0.1)
            await pod.call("StopSandbox")
        await pod.gone()


@pytest.mark.parametrize(
    ("config", "status", "said"),
    [
        ({"linux": {"sysctls": {"kernel.panic": "1"}}}, Status.INVALID_ARGUMENT, "kernel.panic"),
        ({"linux": {"sysctls": {"net...x": "1"}}}, Status.INVALID_ARGUMENT, "net...x"),
        (_users_of(pod_pb2.CONTAINER), Status.INVALID_ARGUMENT, "mode 1"),
        (_users_of(pod_pb2.TARGET), Status.INVALID_ARGUMENT, "mode 3"),
        ({"hostname": "x" * 65}, Status.INVALID_ARGUMENT, "64 bytes"),
        ({"netns_path": "relative"}, Status.INVALID_ARGUMENT, "relative"),
        ({"dns_config": {"servers": ["1\n2"]}}, Status.INVALID_ARGUMENT, "line break"),
        ({"netns_path": "/run/no-such"}, Status.FAILED_PRECONDITION, "no such file"),
        ({"netns_path": "/proc/self/ns/ipc"}, Status.FAILED_PRECONDITION, "something else"),
        ({"linux": {"sysctls": {"net.no.such": "1"}}}, Status.FAILED_PRECONDITION, "net.no.such"),
        (
            {"linux": {"sysctls": {"kernel.shmmax": "many"}}},
            Status.FAILED_PRECONDITION,
            "invalid argument",
        ),
    ],
)
async def test_what_cannot_be_made_is_one_line_and_leaves_nothing(
    start_shim: StartShim, config: dict[str, Any], status: int, said: str
) -> None:
    async with start_shim("pod", sandbox=True) as shim:
        pod = SandboxByHand(shim)
        refused = await _refused(pod.start(**config))
        assert refused.status == status
        assert said in str(refused)
        assert settled(shim.children, []) == []
        assert [left for left in pod.leftovers() if "mount" in left or "file" in left] == []
        await pod.gone()


async def test_a_start_that_cannot_write_leaves_nothing(start_shim: StartShim) -> None:
    async with start_shim("pod", sandbox=True) as shim:
        pod = SandboxByHand(shim)
        os.mkdir(os.path.join(pod.bundle, "holder"))
        refused = await _refused(pod.start())
        assert refused.status == Status.FAILED_PRECONDITION
        assert settled(shim.children, []) == []
        os.rmdir(os.path.join(pod.bundle, "holder"))
        # Nothing stands in the way of another attempt.
        pod.pid = (await pod.call("StartSandbox")).pid
        await pod.gone()


async def test_without_descriptors_a_start_fails_in_one_line_and_leaves_nothing(
    start_shim: StartShim,
) -> None:
    async with start_shim("pod", sandbox=True) as shim:
        pod = SandboxByHand(shim)
        await pod.create()
        before = resource.prlimit(shim.pid, resource.RLIMIT_NOFILE)
        used = max(int(fd) for fd in os.listdir(f"/proc/{shim.pid}/fd")) + 1
        for spare in range(4):
            resource.prlimit(shim.pid, resource.RLIMIT_NOFILE, (used + spare, before[1]))
            said = await _outcome(pod)
            if not said:
                break
            assert "oo many open files" in said
            assert "\n" not in said
            assert settled(shim.children, []) == []
        assert spare > 0
        resource.prlimit(shim.pid, resource.RLIMIT_NOFILE, before)
        assert await pod.state() == "SANDBOX_READY"
        await pod.gone()


# -- a shim that is killed ------------------------------------------------------------------


@pytest.mark.parametrize("member_bundle_is_gone", [False, True])
async def test_of_a_killed_shim_nothing_is_left_after_the_clean_up_of_its_sandbox(
    start_pod: StartPod, *, member_bundle_is_gone: bool
) -> None:
    async with start_pod() as pod:
        crun = pod.shim.options("crun")
        one = await pod.run("one", *SLEEP, options=crun)
        two = await pod.run("two", *SLEEP, share="network ipc uts pid")
        os.kill(pod.shim.pid, signal.SIGKILL)
        await pod.shim.until_gone()
        eventually(lambda: not (is_alive(pod.pid) or is_alive(two)), "the holder dies too")
        assert is_alive(one)
        if member_bundle_is_gone:
            for name in ("one", "two"):
                shutil.rmtree(os.path.join(pod.shim.directory, name))
        assert pod.shim.delete_verb("pod") < 4
        assert not is_alive(one)
        left = [each for each in pod.leftovers() if each not in ("file pod", "file holder")]
        assert left == []
        assert pod.shim.delete_verb("pod") < 4  # again


@pytest.mark.parametrize("has_paths", [False, True])
async def test_killed_at_any_moment_of_a_start_a_shim_leaves_no_holder(
    start_shim: StartShim, by_paths: dict[str, str], *, has_paths: bool
) -> None:
    environment = by_paths if has_paths else None
    for delay in (0.0, 0.002, 0.005, 0.01, 0.02):
        async with start_shim("pod", sandbox=True, environment=environment) as shim:
            pod = SandboxByHand(shim)
            await pod.create(linux=_linux(pid=pod_pb2.CONTAINER))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_outcome, pod)
                await anyio.sleep(delay)
                os.kill(shim.pid, signal.SIGSTOP)
                eventually(functools.partial(_is_stopped, shim.pid), "it stands still")
                family = _family_of(shim.pid)
                os.kill(shim.pid, signal.SIGKILL)
            await shim.until_gone()
            eventually(functools.partial(_are_gone, family), "no process is left")
            shim.delete_verb("pod")
            assert [left for left in pod.leftovers() if not left.startswith("file")] == []


async def _outcome(pod: SandboxByHand) -> str:
    """What a start is answered; empty if it succeeds."""
    try:
        pod.pid = (await pod.call("StartSandbox")).pid
    except (RemoteError, ConnectionClosed) as error:
        return str(error)
    return ""


def _is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


def _are_gone(pids: list[int]) -> bool:
    return not any(map(is_alive, pids))


def _family_of(pid: int) -> list[int]:
    """A process that is stopped, and all that it has started."""
    with suppress(OSError), open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [pid, *(each for child in file.read().split() for each in _family_of(int(child)))]
    return []


def _go_architecture() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
