"""The containers of this node, read from the bundles that containerd keeps.

A bundle is the directory ``STATE/io.containerd.runtime.v2.task/NAMESPACE/ID``. It exists while
containerd has a task of the container, whatever runtime the container uses. :mod:`shim.bundle`
lists the files in it.

Rules
- A container runs while its init process does. The pid in ``init.pid`` counts only if that process
  exists, is not a zombie, and still belongs to the container: its parent is the container's shim,
  or its cgroup path contains the container's id. Pids are reused.
- Bundles appear and disappear. One that is removed while it is read is skipped.
- config.json and its annotations come from users, so every value is checked.

Source: containerd docs/runtime-v2.md; internal/cri/annotations; nerdctl pkg/labels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

from api.values import dataclass, field
from integration.containers.cgroups import cgroups_in, own_cgroup
from integration.containers.errors import StateUnreadable
from integration.containers.nri_records import record_path
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
"""containerd's state directories: of packages, Docker, k3s and RKE2, k0s, MicroK8s."""

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
    name: str
    # distinguishes it from earlier pods with its name; "" if unknown
    uid: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Container:
    """A container with a task in containerd."""

    id: str
    namespace: str  # containerd's
    bundle: str  # the path of its bundle
    pod: Pod | None  # its pod; None if its spec names none
    name: str  # its own name, from the annotations of its spec
    group: str  # the id of its pod's sandbox; its own id without a pod
    sandbox: bool  # whether it is the sandbox of a pod
    pid: int  # its init process; 0 before that is created and after it has exited
    # what was injected (hooks.record), by the shim or by NRI; None if nothing was requested, or it
    # is damaged
    record: Mapping[str, Any] | None = field(default=None, compare=False)
    address: str = ""  # the address of its shim; "" if unknown
    has_stopped: bool = False  # whether its init process has exited
    has_record: bool = field(default=False, compare=False)  # whether its bundle has a record

    @property
    def title(self) -> str:
        """The name for display: its pod and name, or else its id."""
        if self.pod is not None:
            own = "(sandbox)" if self.sandbox else self.name or self.id
            return f"{self.pod.namespace}/{self.pod.name}/{own}"
        return self.name or self.id

    @property
    def created(self) -> float | None:
        """When its init process was created, in seconds since the epoch; None if unknown."""
        try:
            return os.stat(os.path.join(self.bundle, bundle_files.INIT_PID)).st_mtime
        except OSError:
            return None

    def spec(self) -> dict[str, Any]:
        """Return the container's config.json, as the low-level runtime received it.

        Raises:
            BundleUnusable: it was removed, or cannot be read.
        """
        return bundle_files.read_spec(self.bundle)

    def spec_before(self) -> dict[str, Any] | None:
        """Return the container's config.json before the injection; None if nothing was injected.

        Raises:
            BundleUnusable: it cannot be read.
        """
        path = os.path.join(self.bundle, bundle_files.BEFORE)
        if not os.path.lexists(path):
            return None
        content = files.read(path, bundle_files.LONGEST_SPEC)
        return files.parse_object(content, path)

    def rootfs(self, spec: Mapping[str, Any]) -> str | None:
        """Return the directory of the container's root file system; None if its spec names none.

        Args:
            spec: its config.json. The engine has chosen the path, not the image.
        """
        root = spec.get("root")
        named = root.get("path") if isinstance(root, dict) else None
        return os.path.join(self.bundle, named) if isinstance(named, str) and named else None

    def spec_if(self, *marks: bytes) -> dict[str, Any]:
        """Return the container's config.json, or {} if it contains none of the given byte strings.

        It is also empty if the file cannot be read. Most containers have no GPU, and parsing every
        spec of a node takes long, so a search of the raw bytes comes first.
        """
        path = os.path.join(self.bundle, bundle_files.CONFIG)
        try:
            content = files.read(path, bundle_files.LONGEST_SPEC)
            return files.parse_object(content, path) if any(m in content for m in marks) else {}
        except BundleUnusable:
            return {}

    def to_json(self) -> dict[str, Any]:
        """Return what answers show of it."""
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


def state_directories(named: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the named state directories; without any, those of :data:`KNOWN_STATES` that exist."""
    paths = tuple(dict.fromkeys(os.path.abspath(path) for path in named))
    return paths or tuple(path for path in KNOWN_STATES if os.path.isdir(path))


def has_record(directory: str) -> bool:
    """Whether a directory is a bundle in which the shim has injected something."""
    return os.path.lexists(os.path.join(directory, bundle_files.RECORD))


def find_containers(states: Iterable[str], proc: str = "/proc") -> list[Container]:
    """Return the containers with a task in containerd, by namespace and id.

    Args:
        states: containerd's state directories; a missing one has no containers.
        proc: the mount point of procfs.

    Raises:
        StateUnreadable: the caller may not read a directory, because it is not root.
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
    """Return the container of a bundle; None if the directory was removed."""
    # A sandbox that a shim holds has no spec. A bundle that is being created has none yet.
    spec = _or_none(bundle_files.read_spec, bundle) or {}
    name = os.path.basename(bundle)
    record = _or_none(_record, bundle) or _or_none(_parse_record, record_path(spec, name))
    address = _or_none(_address, bundle) or ""
    noted = _or_none(bundle_files.read_pid, os.path.join(bundle, bundle_files.INIT_PID))
    if not os.path.isdir(bundle):
        return None
    runs = bool(noted) and _belongs(procfs, noted or 0, name, address)
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
        # From the same read as the pid: the file may be written between two reads.
        has_stopped=bool(noted) and not runs,
        has_record=record is not None or has_record(bundle),
    )


def _or_none(read: Callable[[str], T], path: str) -> T | None:
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
    return _parse_record(os.path.join(bundle, bundle_files.RECORD))


def _parse_record(path: str) -> dict[str, Any] | None:
    if not os.path.lexists(path):
        return None
    return files.parse_object(files.read(path, _LONGEST_RECORD), path)


def _address(bundle: str) -> str:
    written = bundle_files.read_line(os.path.join(bundle, bundle_files.ADDRESS))
    return (written or bundle_files.bootstrap_address(bundle)).removeprefix(SCHEME)


def _belongs(procfs: Procfs, pid: int, container: str, address: str) -> bool:
    """Whether a process is a container's init, and not a later process with its pid."""
    status = procfs.status(pid)
    if status is None or status.is_zombie:
        return False
    if any(own_cgroup(path, container) for _, path in cgroups_in(procfs.cgroup(pid))):
        return True
    return bool(address) and address in procfs.listening(status.parent)
