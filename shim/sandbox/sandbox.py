"""A pod's sandbox: its namespaces, its /dev/shm and the files that its containers share.

It replaces a pause container, but is not a container: it has no image, no rootfs and no low-level
runtime. By one of two contracts, containerd's CRI learns which namespaces the pod's containers
join:

- **process**: Start returns the pid of the process that holds the namespaces, and the CRI joins
  ``/proc/PID/ns/…``. All releases of containerd support this, even those with the other contract.
  The CRI leaves the files to the sandbox, so this module adds them to each container's spec at
  Create. Existing mounts in their place stay.
- **paths**: Start returns pid 0, and a spec with the path of each namespace, the sysctls and the
  mounts. There is no process: namespaces are mounted in the bundle. A pod with a shared pid
  namespace needs its process 1, so it always uses the first contract.

containerd passes its version when it starts a shim, but no release is known to support the second
contract (containerd pull request 14135). So the operator selects it, with ``namespaces`` in
``[sandbox]`` of config.toml.

Everything is in the sandbox's bundle::

    rootfs/        the pod's /dev/shm: a tmpfs. containerd unmounts it when it removes the
                   bundle, even after a crash of the shim.
    pod/           hostname, hosts and resolv.conf
    holder         the process that holds the namespaces, for the ``delete`` verb
    ns/            or the namespaces, also for that verb
    member.*.json  how to end one of the pod's containers, for the ``delete`` verb

After a shim's death, containerd runs that verb only for the sandbox, so the verb must find the
pod's containers here.

Source: containerd internal/cri/server (container_create.go linuxContainerMounts,
podsandbox/sandbox_run_linux.go), core/runtime/v2/shim_manager.go.
"""

from __future__ import annotations

import enum
import os
import signal
import time
from collections.abc import Iterator
from typing import Any, Final

from shim import bundle as bundle_files
from shim import files, loop
from shim.children import Child, Exit
from shim.context import RuntimeCall, ShimContext
from shim.errors import NvshimError
from shim.processes import start_time_of
from shim.rootfs import detaching, mounts
from shim.sandbox import members, namespaces
from shim.sandbox.errors import PodFilesUnusable, WrongSandboxState
from shim.sandbox.pod import Pod

# As in containerd's own sandboxes.
_SHM_OPTIONS: Final = ("nosuid", "noexec", "nodev", "mode=1777", "size=65536k")
_SHM: Final = "/dev/shm"  # noqa: S108 - a mount point in containers
_LONGEST_FILE: Final = 1 << 20

# The namespaces, by their names in a spec and in /proc/PID/ns.
_KINDS: Final = (
    ("network", "net"), ("uts", "uts"), ("ipc", "ipc"), ("pid", "pid"), ("user", "user"),
)  # fmt: skip

# Seconds for a killed holder to end: the kernel ends its pid namespace first.
_DYING: Final = 10.0


class State(enum.Enum):
    """The states of a sandbox."""

    CREATED = enum.auto()
    READY = enum.auto()
    ENDED = enum.auto()


class Sandbox:
    """The sandbox of the pod that this shim serves.

    Args:
        shim: the state shared with the pod's containers.
        sandbox_id: the sandbox's id.
        bundle: its bundle directory.
        pod: the pod's configuration.
        by_paths: whether containers should find its namespaces by paths, if possible.

    Attributes:
        id: the sandbox's id.
        pod: the pod's configuration.
        pid: the process that holds or held the namespaces; 0 before the start, or without one.
        created_at: when it was created, in nanoseconds since the epoch.
        state: its current state.
        exit: how the holder ended, once it has ended.
    """

    def __init__(
        self, shim: ShimContext, sandbox_id: str, bundle: str, pod: Pod, *, by_paths: bool = False
    ) -> None:
        self.id = sandbox_id
        self.pod = pod
        self.pid = 0
        self.created_at = time.time_ns()
        self.state = State.CREATED
        self.exit: Exit | None = None
        self._shim = shim
        self._bundle = bundle
        self._shm = os.path.join(bundle, bundle_files.ROOTFS)
        self._files = os.path.join(bundle, members.POD)
        self._record = os.path.join(bundle, members.HOLDER)
        self._by_paths = by_paths and not pod.shares_pid
        self._holder: Child | None = None
        self._closed = False
        self._changing = loop.Lock()
        self._ended = loop.Event()

    # -- its life --------------------------------------------------------------------------

    async def start(self) -> None:
        """Create the namespaces and the files.

        Raises:
            WrongSandboxState: it was already started, or was stopped.
            NvshimError: it could not be started; everything was undone.
        """
        async with self._changing:
            if self.state is not State.CREATED:
                raise WrongSandboxState(
                    f"to start sandbox {self.id}",
                    found=f"it is {self.state.name.lower()}",
                    do="a sandbox is started once; create another",
                )
            try:
                # An earlier attempt may have failed to undo itself for lack of descriptors.
                await self._remove_files()
                self._make_files()
                if self.pod.own_ipc:
                    mounts.mount_rootfs([("tmpfs", "shm", "", _SHM_OPTIONS)], self._shm)
                self._holder = await namespaces.hold(self._shim.reaper, self.pod)
                if self._by_paths:
                    members.pin_namespaces(self._bundle, self._holder.pid, self._names())
                    await self._end_holder()
                    self._holder = None
                else:
                    self.pid = self._holder.pid
                    members.write_holder(self._bundle, self.pid, start_time_of(self.pid))
            except BaseException:
                with loop.CancelScope(shield=True):
                    await self._undo_start()
                self.pid, self._holder = 0, None
                raise
            self.state = State.READY
            if self._holder is not None:
                self._shim.tasks.start_soon(self._watch, self._holder)

    async def stop(self) -> None:
        """Stop the holder, and remove everything. May be repeated.

        The namespaces end with their last process.

        Raises:
            UnmountFailed: the pod's /dev/shm is still mounted.
        """
        async with self._changing:
            await self._end_holder()
            if self._holder is None:
                self._finish(None)
            else:
                with loop.move_on_after(_DYING):
                    await self._ended.wait()
            await self._remove_files()
            files.remove(self._record)

    async def wait(self) -> Exit | None:
        """Wait for the holder's end, and return it; None if the sandbox was never started."""
        await self._ended.wait()
        return self.exit

    @property
    def live_pid(self) -> int:
        """The process that holds the namespaces; 0 once it has ended: another may have its pid."""
        return self.pid if self.state is State.READY else 0

    async def _undo_start(self) -> None:
        await self._end_holder()
        try:
            await self._remove_files()
            files.remove(self._record)
        except (NvshimError, OSError) as error:  # the start's error is raised
            self._shim.log.warning("undoing the start of a sandbox", id=self.id, why=str(error))

    async def _watch(self, holder: Child) -> None:
        exit_ = await holder.wait()
        if self.state is State.READY:
            self._shim.log.info("the sandbox has ended", id=self.id, status=exit_.status)
        self._finish(exit_)

    def _finish(self, exit_: Exit | None) -> None:
        self.state = State.ENDED
        self.exit = exit_ or self.exit
        self._ended.set()

    async def _end_holder(self) -> None:
        holder = self._holder
        if holder is not None and holder.exit is None:
            os.kill(holder.pid, signal.SIGKILL)  # not reaped, so the pid is still its own
            with loop.move_on_after(_DYING):
                await holder.wait()

    # -- its files -------------------------------------------------------------------------

    def _make_files(self) -> None:
        hostname = self.pod.hostname or os.uname().nodename
        resolv_conf = self.pod.resolv_conf
        texts = {
            "hostname": f"{hostname}\n".encode(),
            "hosts": _of_the_node("/etc/hosts"),
            "resolv.conf": (
                _of_the_node("/etc/resolv.conf") if resolv_conf is None else resolv_conf.encode()
            ),
        }
        try:
            os.mkdir(self._files)
            os.chmod(self._files, 0o755)  # noqa: S103 - its files are for every user of the pod
            for name, text in texts.items():
                files.write(os.path.join(self._files, name), text, mode=0o644)
        except OSError as error:
            raise PodFilesUnusable(
                f"to make {self._files}", found=os.strerror(error.errno or 0).lower()
            ) from error

    async def _remove_files(self) -> None:
        await detaching.unmount(self._shm)
        files.remove_tree(self._files)
        members.unpin_namespaces(self._bundle)

    def shared_mounts(self, *, read_only: bool = False) -> list[dict[str, Any]]:
        """Return what the pod's containers share, as mounts of an OCI spec.

        Args:
            read_only: whether to mount the files read-only; /dev/shm never is.
        """
        shared = [
            _bind(f"/etc/{name}", os.path.join(self._files, name), "ro" if read_only else "rw")
            for name in ("hostname", "hosts", "resolv.conf")
        ]
        if self.pod.own_ipc:
            shared.append(_bind(_SHM, self._shm, "rw"))
        return shared

    def as_spec(self) -> dict[str, Any]:
        """Return the sandbox as an OCI spec: the namespaces and mounts of a container in the pod.

        A sandbox that is not ready has no namespaces, because another process may now have their
        paths. containerd 2.0 to 2.3 ignore them; later releases can use the files.
        """
        paths = self._paths() if self.state is State.READY else {}
        linux: dict[str, Any] = {
            "namespaces": [
                {"type": kind, "path": paths[name]} for kind, name in _KINDS if name in paths
            ]
        }
        if self._by_paths:
            linux["sysctl"] = dict(self.pod.sysctls)
        return {
            "ociVersion": "1.0.2",
            "hostname": self.pod.hostname,
            "mounts": self.shared_mounts(),
            "linux": linux,
        }

    def _names(self) -> list[str]:
        """Return the names in /proc/PID/ns of the namespaces created for the pod, or joined."""
        own = {
            "net": self.pod.own_network,
            "uts": self.pod.own_network,
            "ipc": self.pod.own_ipc,
            "pid": self.pod.own_pid,
            "user": bool(self.pod.uids),
        }
        if self._by_paths:  # each container has its own pid namespace; CRI's network has a path
            own["pid"] = False
            own["net"] = self.pod.own_network and not self.pod.network_path
        return [name for name, is_own in own.items() if is_own]

    def _paths(self) -> dict[str, str]:
        """Return the paths of the pod's namespaces, by name."""
        if not self._by_paths:
            return {name: f"/proc/{self.pid}/ns/{name}" for name in self._names()}
        paths = {name: members.pinned_namespace(self._bundle, name) for name in self._names()}
        return {"net": self.pod.network_path, **paths} if self.pod.network_path else paths

    # -- the pod's containers ---------------------------------------------------------------

    def close(self) -> None:
        """Refuse new containers from now on, because the pod is stopping."""
        self._closed = True

    def refuse_if_closed(self, container_id: str) -> None:
        """Refuse a container if its pod is stopping or stopped.

        Raises:
            WrongSandboxState: the pod is stopping or stopped.
        """
        if self._closed:
            raise WrongSandboxState(
                f"container {container_id} in sandbox {self.id}",
                found="the sandbox was asked to stop",
                do="delete the pod; its controller recreates it",
            )

    def enter(self, container_id: str, bundle: str, options: RuntimeCall) -> None:
        """Record how to end a container of the pod, before the container exists.

        Args:
            container_id: the container.
            bundle: its bundle directory.
            options: its runtime's options.

        Raises:
            WrongSandboxState: the pod is being stopped.
            BundleUnusable: the record cannot be written.
        """
        self.refuse_if_closed(container_id)
        root = os.path.join(options.root, self._shim.namespace)
        record = bundle_files.RuntimeRecord(
            options.binary_name, root, systemd_cgroup=options.systemd_cgroup
        )
        members.write_member(self._bundle, container_id, bundle, record)

    def leave(self, container_id: str) -> None:
        """Remove the record of a container that does not exist."""
        members.forget_member(self._bundle, container_id)

    def admit(self, spec: dict[str, Any]) -> bool:
        """Add what the pod's containers share to the spec of one of them.

        Args:
            spec: the container's OCI spec; changed in place.

        Returns:
            Whether it was changed. The spec of a container that joins none of the sandbox's
            namespaces does not change.

        Raises:
            WrongSandboxState: it joins namespaces that have ended. Another process may now have
                their paths.
        """
        joined = {kind for kind, path in _namespaces(spec) if self._is_ours(path)}
        if not joined:
            return False
        if self.state is not State.READY:
            raise WrongSandboxState(
                f"a container in sandbox {self.id}",
                found=f"the sandbox is {self.state.name.lower()}",
                do="delete the pod; its controller recreates it",
            )
        present = spec.get("mounts") or []
        if not isinstance(present, list):
            return False  # the runtime will refuse it
        places = {os.path.normpath(str(m.get("destination"))): m for m in _objects(present)}
        root = spec.get("root")
        read_only = isinstance(root, dict) and root.get("readonly") is True
        changed = False
        for mount in self.shared_mounts(read_only=read_only):
            there = places.get(mount["destination"])
            if mount["destination"] == _SHM:
                if "ipc" not in joined or (there and there.get("type") != "tmpfs"):
                    continue
                if there is not None:
                    there.clear()
                    there.update(mount)  # in its old position, before mounts inside it
                    changed = True
                    continue
            elif there is not None:
                continue
            present.append(mount)
            changed = True
        spec["mounts"] = present
        return changed

    def _is_ours(self, path: str) -> bool:
        path = os.path.normpath(path)
        if self._by_paths:
            return path in self._paths().values()
        return bool(self.pid) and path.startswith(f"/proc/{self.pid}/")


def _bind(destination: str, source: str, access: str) -> dict[str, Any]:
    """Return a bind mount with the options that CRI uses."""
    options = ["rbind", "rprivate", access]
    return {"destination": destination, "type": "bind", "source": source, "options": options}


def _objects(values: object) -> Iterator[dict[str, Any]]:
    for value in values if isinstance(values, list) else ():
        if isinstance(value, dict):
            yield value


def _namespaces(spec: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the namespaces that a spec joins: their types and paths."""
    linux = spec.get("linux")
    for namespace in _objects(linux.get("namespaces") if isinstance(linux, dict) else None):
        kind, path = namespace.get("type"), namespace.get("path")
        if isinstance(kind, str) and isinstance(path, str) and path:
            yield kind, path


def _of_the_node(path: str) -> bytes:
    """Return the content of a host file; "" if the file is missing."""
    try:
        with open(path, "rb") as file:
            return file.read(_LONGEST_FILE)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise PodFilesUnusable(
            f"to read {path}", found=os.strerror(error.errno or 0).lower()
        ) from error
