"""The shim holds a pod: the Sandbox service, called directly as containerd 2.x calls it."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import anyio
import pytest

from api import typeurl
from api.errors import Status
from api.proto import pod_pb2
from integration.timeouts import PATIENCE
from tests.harness.runtime import is_alive
from tests.harness.sandbox import (
    NODE,
    SandboxByHand,
    StartPod,
    enter,
    linux_of,
    metrics_of,
    nsenter,
    refusal_of,
    users_of,
)
from tests.harness.shim import CGROUP, StartShim, content_of, wait_for_file
from tests.harness.waiting import eventually

pytestmark = pytest.mark.anyio

SLEEP = ("sleep", "1000")


def _until_end(path: str) -> str:
    """Return the content of a file once it ends with the line "end"."""
    seen = wait_for_file(path)
    return seen if seen.endswith("end\n") else ""


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


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
        assert "LOOPBACK,UP" in enter(two, "ip", "address", "show", "dev", "lo")
        await pod.shim.end("one")
        await pod.shim.end("two")


async def test_what_a_spec_has_itself_stays(pod: SandboxByHand) -> None:
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
    # A spec that joins no namespace is not changed.
    pod.shim.bundle("two", *SLEEP)
    before = pod.shim.spec("two")
    await pod.shim.run("two")
    assert pod.shim.spec("two") == before


async def test_pid_one_of_a_shared_pid_namespace_reaps_and_ignores_its_members(
    pod: SandboxByHand,
) -> None:
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
    # A process with a nice value has a second letter in its state.
    assert ("1", "S", "sandbox") in [(pid, state[0], name) for pid, state, name in listed]
    assert "Z" not in [state[0] for _, state, _ in listed]
    await pod.shim.end("one")
    assert is_alive(two)
    assert await pod.state() == "SANDBOX_READY"


async def test_the_holder_shows_its_pod_nothing_and_who_may_trace_an_empty_root(
    pod: SandboxByHand,
) -> None:
    look = "cat maps mem auxv; for f in root fd cwd map_files; do ls -A $f/; done; readlink exe"
    script = f"cd /proc/1; ({look}; echo end) > /seen 2> /dev/null; sleep 1000"
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
    for name in ("one", "two"):
        pod.member(name, "sh", "-c", script, share="network ipc uts pid")
    spec = pod.shim.spec("two")
    spec["process"]["args"][2] = (
        "(ls -A /proc/1/root; cat /proc/1/environ; echo end) > /seen; sleep 1000"
    )
    for capabilities in spec["process"]["capabilities"].values():
        capabilities.append("CAP_SYS_PTRACE")
    pod.shim.write_spec("two", spec)
    for name, expected in (("one", "end\n"), ("two", "sandbox\nend\n")):
        root = f"/proc/{await pod.shim.run(name)}/root"
        assert eventually(partial(_until_end, f"{root}/seen"), f"{name} has looked") == expected


async def test_namespaces_of_the_node_when_asked_for(
    start_pod: StartPod, node_namespaces: dict[str, str]
) -> None:
    async with start_pod(linux=linux_of(network=NODE, pid=NODE, ipc=NODE), hostname="web-1") as pod:
        assert {name: pod.namespace(name) for name in node_namespaces} == node_namespaces
        status = await pod.call("SandboxStatus")
        assert status.pid == pod.pid
        one = await pod.run("one", *SLEEP)
        assert {name: pod.namespace(name, one) for name in ("net", "ipc", "uts")} == {
            name: node_namespaces[name] for name in ("net", "ipc", "uts")
        }


async def test_the_network_that_containerd_has_made_is_joined(
    start_pod: StartPod, other_network: str
) -> None:
    async with start_pod(netns_path=other_network) as pod:
        assert pod.namespace("net") == os.readlink(other_network)


async def test_sysctls_are_set_in_the_pod_and_not_on_the_node(start_pod: StartPod) -> None:
    asked = {"kernel.shmmax": "123456", "net.ipv4.ip_local_port_range": "30000 40000"}
    before = content_of("/proc/sys/net/ipv4/ip_local_port_range")
    async with start_pod(linux={"sysctls": asked}) as pod:
        names = (*asked, "net.ipv4.ip_unprivileged_port_start", "net.ipv4.ping_group_range")
        values = enter(pod.pid, "sysctl", "-n", *names).splitlines()
        assert [value.split() for value in values] == [
            ["123456"], ["30000", "40000"], ["0"], ["0", "2147483647"],
        ]  # fmt: skip
        assert content_of("/proc/sys/net/ipv4/ip_local_port_range") == before


async def test_a_holder_is_powerless_also_where_nobody_is_but_root(start_pod: StartPod) -> None:
    mapping = {"host_id": 200000, "container_id": 0, "length": 1}
    users = {"uids": [mapping], "gids": [mapping]}
    async with start_pod(linux=linux_of(userns_options=users)) as pod:
        status = content_of(f"/proc/{pod.pid}/status").decode()
        assert "CapEff:\t0000000000000000" in status
        assert "CapPrm:\t0000000000000000" in status


async def test_a_pod_with_a_user_namespace(start_pod: StartPod) -> None:
    async with start_pod(**users_of(pod_pb2.POD), hostname="mapped") as pod:
        assert pod.namespace("user") != os.readlink("/proc/self/ns/user")
        assert content_of(f"/proc/{pod.pid}/uid_map").split() == [b"0", b"200000", b"65536"]
        assert enter(pod.pid, "hostname") == "mapped\n"
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


# -- lifecycle -----------------------------------------------------------------------------


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


async def test_task_shutdown_leaves_a_sandbox_alone(pod: SandboxByHand) -> None:
    await pod.run("one", *SLEEP)
    await pod.shim.end("one")
    await pod.shim.call("Shutdown", id="one")
    await anyio.sleep(0.2)
    assert await pod.state() == "SANDBOX_READY"
    await pod.run("two", *SLEEP)
    await pod.shim.end("two")


async def test_stop_ends_containers_that_still_run_and_tells_it(pod: SandboxByHand) -> None:
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


async def test_stop_with_a_timeout_asks_first(pod: SandboxByHand) -> None:
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


async def test_shutdown_takes_all_that_is_left_with_it(pod: SandboxByHand) -> None:
    one = await pod.run("one", *SLEEP)
    await pod.gone()
    assert not is_alive(one)
    assert pod.shim.events.of("one") == ["TaskCreate", "TaskStart", "TaskExit", "TaskDelete"]


@pytest.mark.parametrize("hangs_up", [True, False])
async def test_the_connection_outlasts_the_answer_to_shutdown_until_the_client_hangs_up(
    pod: SandboxByHand, *, hangs_up: bool
) -> None:
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
    pod: SandboxByHand,
) -> None:
    one = await pod.run("one", *SLEEP)
    two = await pod.run("two", *SLEEP, share="network ipc uts pid")
    pod.kill_holder()
    assert (await pod.call("WaitSandbox")).exit_status == 128 + 9
    status = await pod.call("SandboxStatus")
    assert (status.state, status.pid) == ("SANDBOX_NOTREADY", 0)
    # Its pid namespace is gone, and with it all processes in it.
    assert (await pod.shim.call("Wait", id="two")).exit_status == 128 + 9
    assert not is_alive(two)
    assert is_alive(one)
    pod.member("three", *SLEEP)
    refused = await refusal_of(pod.shim.create("three"))
    assert refused.status == Status.FAILED_PRECONDITION
    assert "NVSHIM-E1603" in str(refused)
    await pod.call("StopSandbox")
    assert not is_alive(one)


async def test_metrics_are_those_of_the_whole_pod(start_pod: StartPod) -> None:
    async with start_pod(linux={"cgroup_parent": CGROUP}) as pod:
        await pod.run("one", *SLEEP)
        await pod.run("two", *SLEEP)
        with anyio.fail_after(60 * PATIENCE):
            # Processes that the runtime left count until they are reaped.
            while (metrics := await metrics_of(pod)).pids.current > 2:  # noqa: ASYNC110 - it asks
                await anyio.sleep(0.01)
        assert metrics.pids.current == 2
        assert [interface.name for interface in metrics.network] == ["lo"]


# -- without any process --------------------------------------------------------------------


async def test_namespaces_are_found_by_paths_and_no_process_holds_them(
    start_pod: StartPod, by_paths: dict[str, str], node_namespaces: dict[str, str]
) -> None:
    asked = {"kernel.shmmax": "123456"}
    linux = {"sysctls": asked, "cgroup_parent": CGROUP, **linux_of(pid=pod_pb2.CONTAINER)}
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
        assert enter(two, "sysctl", "-n", "kernel.shmmax") == "123456\n"
        assert "LOOPBACK,UP" in enter(two, "ip", "address", "show", "dev", "lo")
        status = await pod.call("SandboxStatus")
        assert (status.pid, status.state) == (0, "SANDBOX_READY")
        assert [interface.name for interface in (await metrics_of(pod)).network] == ["lo"]
        # The pod outlives its containers, and the next container joins the same namespaces.
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
        assert "NVSHIM-E1603" in str(await refusal_of(pod.shim.create("four")))


async def test_paths_are_of_what_is_the_pods_own(
    start_pod: StartPod, by_paths: dict[str, str], other_network: str
) -> None:
    own = pod_pb2.CONTAINER
    async with start_pod(by_paths, netns_path=other_network, linux=linux_of(pid=own)) as pod:
        assert pod.paths["network"] == other_network
        assert sorted(os.listdir(f"{pod.bundle}/ns")) == ["ipc", "uts"]
        await pod.run("one", *SLEEP)
    async with start_pod(by_paths, linux=linux_of(network=NODE, ipc=NODE, pid=own)) as pod:
        assert pod.paths == {}


async def test_containers_that_share_processes_need_one_that_holds_them(
    start_pod: StartPod, by_paths: dict[str, str]
) -> None:
    async with start_pod(by_paths) as pod:
        assert is_alive(pod.pid)
        assert pod.paths["pid"] == f"/proc/{pod.pid}/ns/pid"
        assert not os.path.exists(f"{pod.bundle}/ns")


async def test_user_namespace_is_found_by_a_path(
    start_pod: StartPod, by_paths: dict[str, str]
) -> None:
    linux = users_of(pod_pb2.POD)["linux"]
    linux["security_context"]["namespace_options"]["pid"] = pod_pb2.CONTAINER
    async with start_pod(by_paths, linux=linux, hostname="mapped") as pod:
        mapped = nsenter(f"--user={pod.paths['user']}", "cat", "/proc/self/uid_map")
        assert mapped.split() == ["0", "200000", "65536"]
        assert nsenter(f"--uts={pod.paths['uts']}", "hostname") == "mapped\n"


async def test_namespaces_of_a_killed_shim_end_with_the_clean_up_of_its_sandbox(
    start_pod: StartPod, by_paths: dict[str, str]
) -> None:
    async with start_pod(by_paths, linux=linux_of(pid=pod_pb2.CONTAINER)) as pod:
        one = await pod.run("one", *SLEEP)
        os.kill(pod.shim.pid, signal.SIGKILL)
        await pod.shim.until_gone()
        assert is_alive(one)
        assert os.path.exists(pod.paths["ipc"])
        for _ in range(2):
            assert pod.shim.delete_verb("pod") < 4
            assert not is_alive(one)
            assert [left for left in pod.leftovers() if left != "file pod"] == []


def _go_architecture() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
