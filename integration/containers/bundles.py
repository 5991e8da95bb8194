"""The containers of this node, by the bundles that containerd keeps of them.

A bundle lies in ``STATE/io.containerd.runtime.v2.task/NAMESPACE/ID``, for as long as containerd
has a task of it, with whatever runtime. What is ours in it, and what we read of it, is in
:mod:`shim.bundle`.

Rules
- A container runs while its init process does: the pid in ``init.pid``, if that process is there,
  is no zombie, and is the container's still (its parent is the container's shim, or its cgroup has
  the container's id in its path; pids are given again).
- Bundles come and go: one that goes while it is read was never there.
- config.json and its annotations are what somebody asked for, so everything of them is checked.

Source: containerd docs/runtime-v2.md; internal/cri/annotations; nerdctl pkg/labels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from integration.containers.errors import StateUnreadable
from integration.containers.procfs import Procfs
from shim import bundle as bundle_files
from shim import files
from shim.errors import BundleUnusable
from shim.sockets import SCHEME

T = TypeVar("T")

TASKS: Final = "io.containerd.runtime.v2.task"

KNOWN_STATES: Final = (
    "/run/containerd",
    "/run/docker/containerd/daemon",
    "/run/k3s/containerd",
    "/run/k0s/containerd",
    "/var/snap/microk8s/common/run/containerd",
)
"""Where containerd keeps its state, by who starts it: packages, Docker, k3s and RKE2, k0s,
MicroK8s."""

_LONGEST_RECORD: Final = 1 << 24

_SANDBOX: Final = "sandbox"
_TYPE: Final = "io.kubernetes.cri.container-type"
_SANDBOX_ID: Final = "io.kubernetes.cri.sandbox-id"
_POD_NAME: Final = "io.kubernetes.cri.sandbox-name"
_POD_UID: Final = "io.kubernetes.cri.sandbox-uid"
_POD_NAMESPACE: Final = "io.kubernetes.cri.sandbox-namespace"
_NAMES: Final = ("io.kubernetes.cri.container-name", "nerdctl/name")


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of Kubernetes."""

    namespace: str  # of Kubernetes
    name: str  # its name
    # what tells it from others of its name; "" if that is not known
    uid: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Container:
    """A container that containerd has a task of."""

    id: str  # its id
    namespace: str  # containerd's
    bundle: str  # its bundle
    pod: Pod | None  # the pod that it belongs to; None if its spec names none
    name: str  # its own name, where the spec's annotations say it
    group: str  # the id of its pod's sandbox; its own for one without a pod
    sandbox: bool  # whether it is the sandbox of a pod
    pid: int  # its init process; 0 if that has ended, or is not made yet
    # what was injected (hooks.record); None if nothing was asked
    record: Mapping[str, Any] | None = field(default=None, compare=False)
    address: str = ""  # where its shim listens; "" if that is not known
    # whether its init process was made and is no more. That of a container that is being made has
    # not begun.
    has_stopped: bool = False

    @property
    def title(self) -> str:
        """What people call it: its pod and name, or else its id."""
        if self.pod is not None:
            own = "(sandbox)" if self.sandbox else self.name or self.id
            return f"{self.pod.namespace}/{self.pod.name}/{own}"
        return self.name or self.id

    def spec(self) -> dict[str, Any]:
        """Its config.json, as the low-level runtime got it.

        Raises:
            BundleUnusable: it is gone, or cannot be read.
        """
        return bundle_files.read_spec(self.bundle)

    def spec_before(self) -> dict[str, Any] | None:
        """Its config.json before anything was injected; None if nothing was.

        Raises:
            BundleUnusable: it cannot be read.
        """
        path = os.path.join(self.bundle, bundle_files.BEFORE)
        if not os.path.lexists(path):
            return None
        content = files.read(path, bundle_files.LONGEST_SPEC)
        return files.parse_object(content, path)

    def to_json(self) -> dict[str, Any]:
        """What of it an answer has."""
        return {
            "id": self.id,
            "namespace": self.namespace,
            "pod": None
            if self.pod is None
            else {"namespace": self.pod.namespace, "name": self.pod.name},
            "name": self.name or None,
            "sandbox": self.sandbox,
            "pid": self.pid or None,
        }


def state_directories(asked: Iterable[str] = ()) -> tuple[str, ...]:
    """The state directories to look into.

    Returns:
        Those; if none was named, those of :data:`KNOWN_STATES` that are there.
    """
    named = tuple(dict.fromkeys(os.path.abspath(path) for path in asked))
    return named or tuple(path for path in KNOWN_STATES if os.path.isdir(path))


def find_containers(states: Iterable[str], proc: str = "/proc") -> list[Container]:
    """The containers that containerd has tasks of.

    Args:
        states: containerd's state directories; one that is not there has none.
        proc: where procfs is.

    Returns:
        The containers, by namespace and id.

    Raises:
        StateUnreadable: a directory may not be read: the caller is not root.
    """
    procfs = Procfs(proc)
    found = [
        container
        for state in states
        for namespace in _names(os.path.join(state, TASKS))
        for name in _names(os.path.join(state, TASKS, namespace))
        if (container := read_container(os.path.join(state, TASKS, namespace, name), procfs))
    ]
    return sorted(found, key=lambda c: (c.namespace, c.id))


def _names(directory: str) -> Iterator[str]:
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise StateUnreadable(
            f"the containers below {directory}",
            found=os.strerror(error.errno or 0).lower(),
            do="ask as root",
        ) from error
    yield from (entry.name for entry in entries if entry.is_dir(follow_symlinks=False))


def read_container(bundle: str, procfs: Procfs) -> Container | None:
    """The container of one bundle; None if it is none, or was removed meanwhile."""
    # Of a sandbox that a shim holds there is no spec, and of one that is made not yet.
    spec = _or_nothing(bundle_files.read_spec, bundle) or {}
    record = _or_nothing(_record, bundle)
    address = _or_nothing(_address, bundle) or ""
    noted = _or_nothing(bundle_files.read_pid, os.path.join(bundle, bundle_files.INIT_PID))
    if not os.path.isdir(bundle):
        return None
    name = os.path.basename(bundle)
    runs = bool(noted) and _is_of(procfs, noted or 0, name, address)
    annotations = _annotations(spec)
    pod = None
    if annotations.get(_POD_NAME):
        uid = annotations.get(_POD_UID, "")
        pod = Pod(annotations.get(_POD_NAMESPACE, ""), annotations[_POD_NAME], uid)
    return Container(
        id=name,
        namespace=os.path.basename(os.path.dirname(bundle)),
        bundle=bundle,
        pod=pod,
        name=next((annotations[key] for key in _NAMES if annotations.get(key)), ""),
        group=annotations.get(_SANDBOX_ID) or name,
        sandbox=annotations.get(_TYPE) == _SANDBOX,
        pid=noted if noted and runs else 0,
        record=record,
        address=address,
        # Told by the same reading of the file: it may be written between two.
        has_stopped=bool(noted) and not runs,
    )


def _or_nothing(read: Callable[[str], T], path: str) -> T | None:
    try:
        return read(path)
    except BundleUnusable:
        return None


def _annotations(spec: Mapping[str, Any]) -> dict[str, str]:
    annotations = spec.get("annotations")
    if not isinstance(annotations, dict):
        return {}
    return {key: value for key, value in annotations.items() if isinstance(value, str)}


def _record(bundle: str) -> dict[str, Any] | None:
    path = os.path.join(bundle, bundle_files.RECORD)
    if not os.path.lexists(path):
        return None
    return files.parse_object(files.read(path, _LONGEST_RECORD), path)


def _address(bundle: str) -> str:
    written = bundle_files.read_line(os.path.join(bundle, bundle_files.ADDRESS))
    return (written or bundle_files.bootstrap_address(bundle)).removeprefix(SCHEME)


def _is_of(procfs: Procfs, pid: int, container: str, address: str) -> bool:
    """Whether a process is a container's init, and no other that has its pid by now."""
    status = procfs.status(pid)
    if status is None or status.is_zombie:
        return False
    cgroups = procfs.text(pid, "cgroup").splitlines()
    if any(_is_named_after(line.rpartition(":")[2], container) for line in cgroups):
        return True
    return bool(address) and address in procfs.listening(status.parent)


def _is_named_after(cgroup: str, container: str) -> bool:
    """Whether a cgroup is a container's by its name, as cgroupfs or systemd has it."""
    return any(
        part == container or part.endswith(f"-{container}.scope") for part in cgroup.split("/")
    )
