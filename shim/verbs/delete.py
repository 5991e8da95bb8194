"""``delete``: clean up after a shim that has exited, and report how the container ended.

containerd runs it after every exit of a shim, regular or not, with a limit of five seconds. A user
waits for it, so it first checks whether there is anything to do. If nothing is left to clean up,
the launcher answers instead (``shim/forkserver/fast_delete.c``), provided that this module would
give the same answer and change nothing.

Every step runs even if an earlier one failed, and can be repeated. A failure is a line on stderr,
which containerd logs. The verb always answers, because otherwise containerd would keep the
container. If this verb is killed, the next ``start`` on the node finishes its work
(:mod:`shim.verbs.unfinished`).

Source: containerd core/runtime/v2/binary.go Delete; docs/runtime-v2.md.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from api.proto import task_pb2
from shim import bundle, files, mountinfo, sockets
from shim.errors import BundleUnusable, NvshimError
from shim.rootfs import mounts
from shim.runtime import orphans
from shim.sandbox import members as sandbox_members
from shim.verbs import unfinished
from shim.verbs.invocation import Invocation

Read = TypeVar("Read")

# The status after SIGKILL, as in containerd's own shim.
KILLED: Final = 128 + 9

_DEFAULT_RUNTIME: Final = "runc"
_DEFAULT_ROOT: Final = "/run/containerd/runc"
_STDERR: Final = 2

# Seconds, of containerd's five, after which a pod's remaining containers are ended without their
# runtimes.
_MEMBERS_TIMEOUT: Final = 1.5


def delete(invocation: Invocation) -> bytes:
    """Execute the verb.

    Args:
        invocation: the flags. The bundle is that of ``-bundle``, or else the current directory; it
            may be incomplete.

    Returns:
        A DeleteResponse, which containerd reads from stdout.
    """
    path = invocation.bundle or os.getcwd()
    record = _runtime_record(invocation, path)
    note = _note(invocation, path, record)
    _take(path, lambda: _end_sandbox(path))
    _take(path, lambda: sandbox_members.unpin_namespaces(path))
    _clean_up(invocation.container_id, path, record)
    _take(path, lambda: _remove_socket(path, invocation.container_id))
    if note is not None:
        _take(path, note.remove)
    response = task_pb2.DeleteResponse(pid=_pid(path, tell=False), exit_status=KILLED)
    response.exited_at.FromNanoseconds(time.time_ns())
    return response.SerializeToString()


def finish_killed(directory: str, name: str, *, starting: bool = False) -> None:
    """Finish a ``delete`` that was killed.

    Args:
        directory: the directory of sockets.
        name: the name of its note.
        starting: whether that container is starting again. Its bundle is then new and unused, and
            this call waits for another process that does the work.
    """
    note = unfinished.take(directory, name, wait=starting)
    if note is None:
        return
    if not starting and note.left and note.left[0].is_made_again():
        note.leave()  # its own start has done this, or will
        return
    _take(directory, lambda: orphans.end_process(*note.holder))
    for left in note.left:
        _take(left.bundle, _finish(left))
    _take(directory, note.remove)


def _finish(left: unfinished.Left) -> Callable[[], None]:
    def finish() -> None:
        if left.is_there():
            sandbox_members.unpin_namespaces(left.bundle)
            _clean_up(left.id, left.bundle, left.record)
            return
        _unmount(os.path.join(left.record.root, left.id, bundle.RESTORED_ROOT))
        for problem in orphans.end_container(
            left.record, left.id, left.pid, cgroup_path=left.cgroup
        ):
            _warn(problem)

    return finish


def _note(
    invocation: Invocation, path: str, record: bundle.RuntimeRecord
) -> unfinished.Note | None:
    """Record how to end everything that is left; return None if that fails."""
    try:
        directory = _socket_directory(path) or sockets.prepare_directory()
        left = [_left(invocation.container_id, path, record)]
        for container_id in sandbox_members.members(path):
            where, of_member = sandbox_members.read_member(path, container_id)
            left.append(_left(container_id, where, of_member))
        name = sockets.name_of(invocation.address, invocation.namespace, invocation.container_id)
        return unfinished.write(directory, name, sandbox_members.read_holder(path), left)
    except (NvshimError, OSError):
        return None  # the step that needs it reports the error


def _left(container_id: str, path: str, record: bundle.RuntimeRecord) -> unfinished.Left:
    return unfinished.Left(
        id=container_id,
        bundle=path,
        identity=unfinished.identity_of(path),
        record=record,
        pid=_pid(path, tell=False),
        cgroup=_cgroup_path(path),
    )


def _clean_up(
    container_id: str, path: str, record: bundle.RuntimeRecord, *, ask_runtime: bool = True
) -> None:
    """Remove the remains of a container, whose bundle may be half created, or gone."""
    staging = os.path.join(path, bundle.STAGING)
    calls = bundle.calls_under_way(path)
    _take(
        path,
        lambda: _end_calls(path, calls),
        lambda: _end_container(
            container_id, path, record, cut_off=bool(calls), ask_runtime=ask_runtime
        ),
        lambda: _end_loggers(path),
        lambda: _unmount(os.path.join(path, bundle.ROOTFS)),
        lambda: _unmount(staging),
        lambda: files.remove_tree(staging),
        # Only after its processes have ended, because the next container may then get the GPU.
        lambda: bundle.release_claim(path),
    )


def _take(path: str, *steps: Callable[[], object]) -> None:
    """Take all steps, even after one that fails."""
    for step in steps:
        try:
            step()
        except NvshimError as error:
            _warn(str(error))
        except OSError as error:
            _warn(f"{error.filename or path}: {os.strerror(error.errno or 0).lower()}")


def _pid(path: str, *, tell: bool = True) -> int:
    try:
        return bundle.read_pid(os.path.join(path, bundle.INIT_PID))
    except BundleUnusable as error:
        if tell:
            _warn(str(error))
        return 0


def _end_calls(path: str, logs: Sequence[str]) -> None:
    """End the dead shim's runtime calls, which would only create orphans."""
    if logs:
        for problem in orphans.end_calls(path, logs):
            _warn(problem)


def _end_sandbox(path: str) -> None:
    """End the containers of a sandbox's pod and its holder, since no other process does."""
    members = sandbox_members.members(path)
    pid, start_time = _read(lambda: sandbox_members.read_holder(path)) or (0, 0)
    if not (members or pid):
        return
    deadline = time.monotonic() + _MEMBERS_TIMEOUT
    orphans.end_process(pid, start_time)
    for container_id in members:
        _take(path, _end_of_member(path, container_id, deadline))


def _end_of_member(path: str, container_id: str, deadline: float) -> Callable[[], None]:
    def end() -> None:
        where, record = sandbox_members.read_member(path, container_id)
        in_time = time.monotonic() < deadline
        _clean_up(container_id, where, record, ask_runtime=in_time)
        sandbox_members.forget_member(path, container_id)

    return end


def _end_loggers(path: str) -> None:
    """End the loggers that the dead shim had started."""
    loggers = bundle.loggers_left(path)
    if loggers:
        for problem in orphans.end_loggers(loggers):
            _warn(problem)


def _end_container(
    container_id: str,
    path: str,
    record: bundle.RuntimeRecord,
    *,
    cut_off: bool,
    ask_runtime: bool,
) -> None:
    """End a container that has not ended regularly.

    A runtime call may have been ``cut_off`` before it recorded what it created.
    """
    pid = _pid(path)
    state = os.path.join(record.root, container_id)
    if not (cut_off or os.path.lexists(state) or os.path.exists(f"/proc/{pid}")):
        return
    _unmount(os.path.join(state, bundle.RESTORED_ROOT))
    for problem in orphans.end_container(
        record,
        container_id,
        pid,
        cgroup_path=_cgroup_path(path),
        ask_runtime=ask_runtime,
    ):
        _warn(problem)


def _cgroup_path(path: str) -> str:
    """Return the cgroup in the container's spec; "" without one, or without a spec."""
    try:
        return bundle.cgroups_path_of(bundle.read_spec(path))
    except BundleUnusable:
        return ""


def _runtime_record(invocation: Invocation, path: str) -> bundle.RuntimeRecord:
    """Return the runtime's options; the defaults if the server has not recorded them."""
    record = _read(lambda: bundle.read_runtime_record(path))
    if record is None:
        binary = _read(lambda: bundle.read_line(os.path.join(path, bundle.RUNTIME)))
        root = os.path.join(_DEFAULT_ROOT, invocation.namespace)
        record = bundle.RuntimeRecord(binary or _DEFAULT_RUNTIME, root, systemd_cgroup=False)
    return record


def _read(read: Callable[[], Read | None]) -> Read | None:
    """Read a part of a bundle; warn and return None if it is unusable."""
    try:
        return read()
    except BundleUnusable as error:
        _warn(str(error))
        return None


def _unmount(path: str) -> None:
    if mountinfo.mount_points_below(path):
        mounts.unmount_rootfs(path)


def _socket(path: str) -> str:
    """Return the path of the shim's socket from the bundle; "" if it has none."""
    where = bundle.read_line(os.path.join(path, bundle.ADDRESS)) or bundle.bootstrap_address(path)
    return where.removeprefix(sockets.SCHEME) if where.startswith(sockets.SCHEME) else ""


def _socket_directory(path: str) -> str:
    return os.path.dirname(_socket(path))


def _remove_socket(path: str, container_id: str) -> None:
    """Remove the socket, unless the shim of the container's pod lives on."""
    socket = _socket(path)
    if socket:
        sockets.forget(socket, container_id)
        sockets.remove_dead(socket)
        sockets.sweep(os.path.dirname(socket))


def _warn(line: str) -> None:
    try:
        os.write(_STDERR, f"{line}\n".encode(errors="replace"))
    except OSError:
        pass  # containerd does not listen
