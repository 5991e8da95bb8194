"""What the containers of a pod share, and what each is allowed."""

from __future__ import annotations

import os
import signal

import pytest

from api.proto import cri_pb2 as pb
from tests.harness.pods import IDLE, PodContainer, Pods
from tests.harness.runtime import is_alive
from tests.harness.waiting import eventually, settled

UNCONFINED = pb.SecurityProfile(profile_type=pb.SecurityProfile.Unconfined)
OWN_PIDS = pb.NamespaceOption(pid=pb.CONTAINER)


def test_containers_share_network_ipc_and_hostname_and_not_processes(pods: Pods) -> None:
    pod = pods.run(hostname="shared-name")
    first, second = pod.start(*IDLE), pod.start(*IDLE)
    shared = {"net", "ipc", "uts"}
    for kind in ("net", "ipc", "uts", "pid", "mnt"):
        assert (_namespace(first, kind) == _namespace(second, kind)) == (kind in shared), kind
        assert _namespace(first, kind) != os.readlink(f"/proc/self/ns/{kind}"), kind
    assert second.exec("hostname").stdout == "shared-name\n"
    assert pod.ip in first.exec("ip", "-o", "addr").stdout
    assert first.exec("sh", "-c", "echo mine > /dev/shm/word").code == 0
    assert second.exec("cat", "/dev/shm/word").stdout == "mine\n"
    # A container counts as running once it has been told to execute its program.
    assert settled(lambda: first.exec("ps").stdout.count("sleep"), 1) == 1
    # Pods can reach each other.
    other = pods.run().start(*IDLE)
    assert other.exec("ping", "-c", "1", "-W", "5", pod.ip).code == 0


def test_pod_with_one_process_namespace(pods: Pods) -> None:
    pod = pods.run(namespaces=pb.NamespaceOption(pid=pb.POD))
    first, second = pod.start("sleep", "1001"), pod.start("sleep", "1002")
    eventually(lambda: "sleep 1001" in second.exec("ps").stdout, "it is there")
    assert "1 /pause" in second.exec("ps", "-o", "pid,args").stdout
    assert _namespace(first, "pid") == _namespace(second, "pid")
    # A dead container's processes are killed with it; its neighbours stay.
    assert first.exec("sh", "-c", "sleep 1003 >/dev/null 2>&1 &").code == 0
    eventually(lambda: "sleep 1003" in second.exec("ps").stdout, "it is there")
    os.kill(first.pid, signal.SIGKILL)
    assert first.exit_code() == 137
    eventually(lambda: "sleep 1003" not in second.exec("ps").stdout, "it is gone")
    listed = second.exec("ps", "-o", "pid,args").stdout
    assert "sleep 1002" in listed
    assert "1 /pause" in listed
    assert second.state == "RUNNING"
    assert pod.is_ready
    assert pod.run("true").status.exit_code == 0


def test_pod_in_the_process_namespace_of_the_host(pods: Pods) -> None:
    pod = pods.run(namespaces=pb.NamespaceOption(pid=pb.NODE))
    container = pod.start(*IDLE)
    assert _namespace(container, "pid") == os.readlink("/proc/self/ns/pid")
    child = container.exec("sh", "-c", "sleep 1004 >/dev/null 2>&1 & echo $!").stdout
    container.stop()
    # All of the container's processes are killed, and no others.
    eventually(lambda: not is_alive(int(child)), "its other process is gone")
    assert container.exit_code() == 137 or container.exit_code() == 143


def test_container_in_the_process_namespace_of_another(pods: Pods) -> None:
    pod = pods.run()
    target = pod.start("sleep", "1005")
    options = pb.NamespaceOption(pid=pb.TARGET, target_id=target.id)
    security = pb.LinuxContainerSecurityContext(namespace_options=options, seccomp=UNCONFINED)
    debugger = pod.start(*IDLE, security=security)
    eventually(lambda: "sleep 1005" in debugger.exec("ps").stdout, "it is there")
    debugger.stop()
    assert target.state == "RUNNING"
    assert target.exec("true").code == 0


def test_pod_in_the_network_of_the_host(pods: Pods) -> None:
    options = pb.NamespaceOption(network=pb.NODE, pid=pb.CONTAINER)
    pod = pods.run(namespaces=options)
    container = pod.start(*IDLE)
    assert _namespace(container, "net") == os.readlink("/proc/self/ns/net")
    assert pod.ip == ""
    assert container.exec("hostname").stdout.strip() == os.uname().nodename


def test_user_and_groups(pods: Pods) -> None:
    pod = pods.run()
    security = pb.LinuxContainerSecurityContext(
        namespace_options=OWN_PIDS,
        seccomp=UNCONFINED,
        run_as_user=pb.Int64Value(value=1000),
        run_as_group=pb.Int64Value(value=3000),
        supplemental_groups=[4000, 5000],
        no_new_privs=True,
    )
    script = "id; grep NoNewPrivs /proc/self/status; echo words > /dev/stdout"
    container = pod.start("sh", "-c", f"{script}; exec sleep 1000", security=security)
    expected = ["uid=1000(user) gid=3000 groups=3000,4000,5000", "NoNewPrivs:\t1", "words"]
    eventually(lambda: container.output().splitlines() == expected, "its output")
    assert container.exec("sh", "-c", script).lines == expected


def test_privileged_container_sees_the_devices_and_others_do_not(pods: Pods) -> None:
    security = pb.LinuxSandboxSecurityContext(
        namespace_options=OWN_PIDS, privileged=True, seccomp=UNCONFINED
    )
    pod = pods.run(security=security)
    mine = pb.LinuxContainerSecurityContext(
        namespace_options=OWN_PIDS, privileged=True, seccomp=UNCONFINED
    )
    script = (
        "mkdir -p /mnt; test -e /dev/kmsg; echo $?; mount -t tmpfs none /mnt && echo mounted; "
        "cat /proc/self/status"
    )
    container = pod.run("sh", "-c", script, security=mine)
    lines = container.output().splitlines()
    assert lines[:2] == ["0", "mounted"]
    assert "CapEff:\t00000000a80425fb" not in lines
    plain = pod.run("sh", "-c", script).output().splitlines()
    assert plain[0] == "1"
    assert "mounted" not in plain
    assert "CapEff:\t00000000a80425fb" in plain


def test_seccomp_readonly_root_and_sysctls(pods: Pods) -> None:
    pod = pods.run(sysctls={"net.ipv4.ip_unprivileged_port_start": "80"})
    security = pb.LinuxContainerSecurityContext(
        namespace_options=OWN_PIDS,
        seccomp=pb.SecurityProfile(profile_type=pb.SecurityProfile.RuntimeDefault),
        readonly_rootfs=True,
    )
    script = (
        "grep Seccomp: /proc/self/status; touch /x; unshare -U true; "
        "cat /proc/sys/net/ipv4/ip_unprivileged_port_start"
    )
    container = pod.run("sh", "-c", script, security=security)
    assert container.output().splitlines() == ["Seccomp:\t2", "80"]
    errors = container.output("stderr")
    assert "Read-only file system" in errors
    assert "Operation not permitted" in errors


@pytest.mark.parametrize("handler", ["nvidia", "plain"])
def test_nothing_of_a_pod_is_in_the_way_of_the_next(pods: Pods, handler: str) -> None:
    config = pods.config()
    for attempt in range(3):
        config.metadata.attempt = attempt
        pod = pods.run_config(config, handler=handler)
        assert pod.run("true").status.exit_code == 0
        pod.remove()
    assert pods.ids() == []


def _namespace(container: PodContainer, kind: str) -> str:
    return os.readlink(f"/proc/{container.pid}/ns/{kind}")
