"""Read the configuration of a pod's sandbox from CRI's CreateSandbox request.

Rules
- By default a pod has its own network, IPC and UTS namespaces.
- ``NODE`` means the node's namespace. A pod in the node's network also has the node's hostname: it
  cannot rename the node, and its name must match its addresses.
- The pid namespace is the pod's own or the node's, even if each container has its own: a container
  that requests the pod's must never get the node's instead.
- A user namespace is the pod's own or the node's. Other modes name another pod's namespace. They
  are refused, because the pod would not get it.
- A sysctl is set only if it belongs to one of the pod's own namespaces.
- As by default in containerd's own sandboxes, ports below 1024 and ICMP echo need no privilege,
  because they are the pod's own.

Source: kubernetes cri-api PodSandboxConfig; containerd internal/cri/server/podsandbox; runc
libcontainer/configs/validate for the namespaces of sysctls; systemd.slice(5).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Final

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError

from api import typeurl
from api.proto import pod_pb2
from api.values import dataclass
from shim.sandbox.errors import InvalidPodConfig, SysctlRefused

_CONFIG: Final = "runtime.v1.PodSandboxConfig"

_LONGEST_HOSTNAME: Final = 64
_SLICE: Final = ".slice"

# The namespace of a sysctl, by its first letters.
_IPC_SYSCTLS: Final = (
    "kernel.msgmax", "kernel.msgmnb", "kernel.msgmni", "kernel.sem", "kernel.shmall",
    "kernel.shmmax", "kernel.shmmni", "kernel.shm_rmid_forced",
)  # fmt: skip
_NETWORK_PREFIX: Final = "net."
_IPC_PREFIX: Final = "fs.mqueue."

_UNPRIVILEGED_PORTS: Final = ("net.ipv4.ip_unprivileged_port_start", "0")
_UNPRIVILEGED_ECHO: Final = ("net.ipv4.ping_group_range", "0 2147483647")

_LINE_BREAK: Final = re.compile(r"[\n\r\0]")


@dataclass(frozen=True, slots=True)
class IdMapping:
    """A range of ids in a user namespace."""

    inside: int  # the first id in the namespace
    outside: int  # that id on the node
    count: int  # the number of ids


@dataclass(frozen=True, slots=True)
class Pod:
    """The configuration of a sandbox."""

    hostname: str = ""  # its hostname; empty for the node's
    # the network namespace that containerd has created for it; empty for none
    network_path: str = ""
    own_network: bool = True  # whether its network (and so its hostname) is its own
    own_ipc: bool = True  # whether its IPC and /dev/shm are its own
    own_pid: bool = True  # whether its processes have their own pid namespace
    shares_pid: bool = True  # whether all its containers share the pod's
    uids: tuple[IdMapping, ...] = ()  # the mapping of its user namespace; empty for none
    gids: tuple[IdMapping, ...] = ()  # the same for groups
    # names, with dots, and values, in the order of setting them
    sysctls: tuple[tuple[str, str], ...] = ()
    resolv_conf: str | None = None  # the text of its resolv.conf; None for the node's
    cgroup_parent: str = ""  # the cgroup of the whole pod, in CRI's form; may be empty


def read_pod(options: AnyMessage | None, network_path: str) -> Pod:
    """Read the options of a CreateSandbox request.

    Args:
        options: CRI's PodSandboxConfig; None or empty for the defaults.
        network_path: the network namespace that containerd has created; may be empty.

    Raises:
        InvalidPodConfig: the options have another type, or request the impossible.
        SysctlRefused: a sysctl does not belong to the pod.
    """
    config = _decode(options)
    linux = config.linux
    namespaces = linux.security_context.namespace_options
    uids, gids = _read_mappings(namespaces.userns_options)
    if network_path and not network_path.startswith("/"):
        raise InvalidPodConfig(
            f"the network namespace {network_path!r}", found="not an absolute path", do="name one"
        )
    hostname = config.hostname
    if len(os.fsencode(hostname)) > _LONGEST_HOSTNAME or _LINE_BREAK.search(hostname):
        raise InvalidPodConfig(
            f"the hostname {hostname!r}",
            found=f"more than {_LONGEST_HOSTNAME} bytes, or a line break",
            do="choose a name that the kernel takes",
        )
    own_network = namespaces.network != pod_pb2.NODE
    own_ipc = namespaces.ipc != pod_pb2.NODE
    return Pod(
        hostname=hostname if own_network else "",
        network_path=network_path if own_network else "",
        own_network=own_network,
        own_ipc=own_ipc,
        own_pid=namespaces.pid != pod_pb2.NODE,
        shares_pid=namespaces.pid == pod_pb2.POD,
        uids=uids,
        gids=gids,
        sysctls=choose_sysctls(
            linux.sysctls, own_network=own_network, own_ipc=own_ipc, own_users=bool(uids)
        ),
        # Without a server, a search list or an option, use the node's, like containerd's own
        # sandboxes.
        resolv_conf=_resolv_conf(config.dns_config) or None,
        cgroup_parent=linux.cgroup_parent,
    )


def choose_sysctls(
    asked: Mapping[str, str], *, own_network: bool, own_ipc: bool, own_users: bool
) -> tuple[tuple[str, str], ...]:
    """Return the sysctls to set in a pod's namespaces.

    Args:
        asked: CRI's names and values.
        own_network: whether the network namespace is the pod's.
        own_ipc: whether the IPC namespace is the pod's.
        own_users: whether the pod has a user namespace.

    Returns:
        The names, with dots, and the values.

    Raises:
        SysctlRefused: a sysctl belongs to the node.
    """
    chosen = {}
    for name, value in sorted(asked.items()):
        dotted = ".".join(sysctl_path(name))
        if dotted.startswith(_NETWORK_PREFIX):
            own, where = own_network, "network"
        elif dotted in _IPC_SYSCTLS or dotted.startswith(_IPC_PREFIX):
            own, where = own_ipc, "IPC"
        else:
            raise SysctlRefused(
                f"sysctl {name}",
                found="it belongs to no namespace of a pod, but to the node",
                do="set it on the node",
            )
        if not own:
            raise SysctlRefused(
                f"sysctl {name}",
                found=f"a pod in the node's {where} namespace",
                do="set it on the node, or give the pod a namespace of its own",
            )
        chosen[name] = value
    if own_network:
        chosen.setdefault(*_UNPRIVILEGED_PORTS)
        # In a user namespace the kernel accepts only mapped groups.
        if not own_users:
            chosen.setdefault(*_UNPRIVILEGED_ECHO)
    return tuple(chosen.items())


def sysctl_path(name: str) -> list[str]:
    """Return the names of a sysctl's directories below /proc/sys, and of its file.

    Args:
        name: the name, separated by dots, or by slashes if a dot is part of a name (the interface
            ``eth0.100``). The first separator in it counts.

    Raises:
        SysctlRefused: it does not name a file below /proc/sys.
    """
    first = re.search(r"[./]", name)
    if first is not None and first[0] == "/":
        parts = name.split("/")
    else:
        parts = [part.replace("/", ".") for part in name.split(".")]
    if len(parts) < 2 or any(p in ("", ".", "..") or "/" in p or "\0" in p for p in parts):  # noqa: PLR2004 - a directory and a file
        raise SysctlRefused(f"sysctl {name!r}", found="not the name of a sysctl", do="correct it")
    return parts


def cgroup_path(parent: str) -> str:
    """Return the path of a pod's cgroup in its hierarchy.

    Args:
        parent: the parent in CRI's form: a path or, if systemd manages the cgroups, the name of a
            slice, whose dashes separate its parent slices.

    Returns:
        An absolute path.
    """
    name = os.path.basename(parent)
    if not name.endswith(_SLICE) or "/" in parent.strip("/"):
        return os.path.normpath("/" + parent.lstrip("/"))
    words = name.removesuffix(_SLICE).split("-")
    slices = ["-".join(words[: i + 1]) + _SLICE for i in range(len(words))]
    return "/" + "/".join(slices)


def _decode(options: AnyMessage | None) -> pod_pb2.PodSandboxConfig:
    if options is None or not options.type_url:
        return pod_pb2.PodSandboxConfig()
    kind = typeurl.full_name(options)
    try:
        if kind == _CONFIG:
            return pod_pb2.PodSandboxConfig.FromString(options.value)
    except DecodeError as error:
        raise InvalidPodConfig(
            "the options of a sandbox", found=f"{kind} that cannot be decoded: {error}"
        ) from error
    raise InvalidPodConfig(
        "the options of a sandbox", found=f"{kind}", do=f"send a {_CONFIG}, as CRI does"
    )


def _read_mappings(
    asked: pod_pb2.UserNamespace,
) -> tuple[tuple[IdMapping, ...], tuple[IdMapping, ...]]:
    if asked.mode not in (pod_pb2.POD, pod_pb2.NODE):
        raise InvalidPodConfig(
            f"a user namespace of mode {asked.mode}",
            found="it is not POD (0) or NODE (2)",
            do="ask for one of them, as the kubelet does",
        )
    uids, gids = _mappings(asked.uids), _mappings(asked.gids)
    if asked.mode == pod_pb2.NODE or not (uids or gids):
        return (), ()
    for kind, mappings in (("uids", uids), ("gids", gids)):
        # The process that sets up the namespace must be its root.
        if not any(m.inside == 0 for m in mappings):
            raise InvalidPodConfig(
                f"a user namespace with {kind} {mappings}",
                found="they do not map user 0",
                do="map 0 too, as the kubelet does",
            )
    return uids, gids


def _mappings(asked: Iterable[pod_pb2.IDMapping]) -> tuple[IdMapping, ...]:
    return tuple(IdMapping(m.container_id, m.host_id, m.length) for m in asked if m.length)


def _resolv_conf(dns: pod_pb2.DNSConfig) -> str:
    for word in (*dns.servers, *dns.searches, *dns.options):
        if _LINE_BREAK.search(word):
            raise InvalidPodConfig(f"the DNS option {word!r}", found="a line break in it")
    lines = []
    if dns.searches:
        lines.append(f"search {' '.join(dns.searches)}")
    lines += [f"nameserver {server}" for server in dns.servers]
    if dns.options:
        lines.append(f"options {' '.join(dns.options)}")
    return "".join(f"{line}\n" for line in lines)
