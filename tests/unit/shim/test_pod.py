"""Parse a pod's configuration from CRI's request."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.any_pb2 import Any as AnyMessage

from api import typeurl
from api.proto import pod_pb2
from shim.sandbox.errors import InvalidPodConfig, SysctlRefused
from shim.sandbox.pod import IdMapping, Pod, cgroup_path, choose_sysctls, read_pod, sysctl_path
from tests.harness.raising import raises

URL = "runtime.v1.PodSandboxConfig"
DEFAULTS = (
    ("net.ipv4.ip_unprivileged_port_start", "0"),
    ("net.ipv4.ping_group_range", "0 2147483647"),
)


def _read(network: str = "", **config: Any) -> Pod:
    return read_pod(typeurl.pack(pod_pb2.PodSandboxConfig(**config), url=URL), network)


def _namespaces(**options: Any) -> dict[str, Any]:
    return {"security_context": {"namespace_options": options}}


@pytest.mark.parametrize("options", [None, AnyMessage()])
def test_what_is_not_said_is_the_pods_own(options: AnyMessage | None) -> None:
    assert read_pod(options, "/run/netns/a") == Pod(network_path="/run/netns/a", sysctls=DEFAULTS)


def test_all_of_it() -> None:
    pod = _read(
        "/run/netns/a",
        hostname="web-1",
        dns_config={"servers": ["1.1.1.1", "::1"], "searches": ["a", "b"], "options": ["ndots:5"]},
        linux={"cgroup_parent": "/kubepods/pod1", "sysctls": {"kernel.sem": "1 2 3 4"}},
    )
    assert pod == Pod(
        hostname="web-1",
        network_path="/run/netns/a",
        sysctls=(("kernel.sem", "1 2 3 4"), *DEFAULTS),
        resolv_conf="search a b\nnameserver 1.1.1.1\nnameserver ::1\noptions ndots:5\n",
        cgroup_parent="/kubepods/pod1",
    )


def test_a_pod_without_any_dns_configuration_has_the_nodes() -> None:
    assert _read().resolv_conf is None
    assert _read(dns_config={}).resolv_conf is None


def test_a_pod_on_the_nodes_network_has_neither_its_name_nor_its_sysctls() -> None:
    pod = _read("/run/netns/a", hostname="web-1", linux=_namespaces(network=pod_pb2.NODE))
    assert (pod.own_network, pod.network_path, pod.hostname, pod.sysctls) == (False, "", "", ())


@pytest.mark.parametrize(
    ("mode", "own"), [("POD", True), ("CONTAINER", True), ("TARGET", True), ("NODE", False)]
)
def test_only_the_nodes_pid_namespace_is_not_the_pods(mode: str, *, own: bool) -> None:
    pod = _read(linux=_namespaces(pid=pod_pb2.NamespaceMode.Value(mode)))
    assert pod.own_pid is own
    assert pod.shares_pid is (mode == "POD")


def test_a_user_namespace() -> None:
    mapping = {"host_id": 1000, "container_id": 0, "length": 65536}
    users = {"uids": [mapping], "gids": [mapping]}
    pod = _read(linux=_namespaces(userns_options=users))
    assert pod.uids == pod.gids == (IdMapping(inside=0, outside=1000, count=65536),)
    assert pod.sysctls == DEFAULTS[:1]
    node = _read(linux=_namespaces(userns_options={**users, "mode": pod_pb2.NODE}))
    assert node.uids == ()


@pytest.mark.parametrize(
    "users",
    [
        {"uids": [{"host_id": 1000, "container_id": 0, "length": 1}]},
        {"uids": [{"host_id": 1, "container_id": 1, "length": 9}], "gids": []},
    ],
)
def test_a_user_namespace_without_root_is_refused(users: dict[str, Any]) -> None:
    with raises(InvalidPodConfig, match="they do not map user 0"):
        _read(linux=_namespaces(userns_options=users))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (AnyMessage(type_url="some.Thing"), "some.Thing"),
        (AnyMessage(type_url=URL, value=b"\xff\xff"), "cannot be decoded"),
    ],
)
def test_other_options_are_refused(options: AnyMessage, said: str) -> None:
    with raises(InvalidPodConfig, match=said):
        read_pod(options, "")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("kernel.shmmax", ["kernel", "shmmax"]),
        ("net.ipv4.conf.eth0/100.forwarding", ["net", "ipv4", "conf", "eth0.100", "forwarding"]),
        ("net/ipv4/conf/eth0.100/forwarding", ["net", "ipv4", "conf", "eth0.100", "forwarding"]),
    ],
)
def test_the_file_of_a_sysctl(name: str, parts: list[str]) -> None:
    assert sysctl_path(name) == parts


@pytest.mark.parametrize(
    "name",
    ["", "net", "net..x", "net/../../../etc/passwd", "net.//.x", ".net.x", "net/./x", "a\0.b"],
)
def test_what_is_no_sysctl_is_refused(name: str) -> None:
    with raises(SysctlRefused):
        sysctl_path(name)


@pytest.mark.parametrize(
    ("name", "network", "ipc"),
    [
        ("kernel.panic", True, True),
        ("kernel.hostname", True, True),
        ("vm/swappiness", True, True),
        ("net.ipv4.tcp_rmem", False, True),
        ("kernel.shmall", True, False),
        ("fs.mqueue.msg_max", True, False),
        ("fs.file-max", True, True),
        ("kernel.shm_other", True, True),
        ("net/ipv4/tcp_rmem", False, True),
    ],
)
def test_a_sysctl_of_the_node_is_refused(name: str, *, network: bool, ipc: bool) -> None:
    with raises(SysctlRefused, match="node"):
        choose_sysctls({name: "1"}, own_network=network, own_ipc=ipc, own_users=False)


def test_what_is_asked_for_precedes_the_defaults() -> None:
    asked = {"net.ipv4.ip_unprivileged_port_start": "1024"}
    chosen = choose_sysctls(asked, own_network=True, own_ipc=True, own_users=True)
    assert chosen == (("net.ipv4.ip_unprivileged_port_start", "1024"),)


@pytest.mark.parametrize(
    ("parent", "path"),
    [
        ("/kubepods/burstable/pod1", "/kubepods/burstable/pod1"),
        ("kubepods", "/kubepods"),
        (
            "kubepods-burstable-pod1_2.slice",
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice",
        ),
        ("/kubepods.slice/kubepods-pod1.slice", "/kubepods.slice/kubepods-pod1.slice"),
    ],
)
def test_the_cgroup_of_a_pod(parent: str, path: str) -> None:
    assert cgroup_path(parent) == path
