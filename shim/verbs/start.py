"""``start``: return the address of the pod's shim to containerd; start a shim if there is none.

The socket listens before the shim imports its modules: containerd's first connection waits in the
backlog. The answer has the format that containerd expects:

- containerd from 2.3 on writes BootstrapParams to stdin, and reads a BootstrapResult of version 3;
- an older one gets the bare address: 1.6 understands nothing else, and from 1.7 on, text that is
  not JSON is an address with version 2 and ttrpc, as intended. With version 3 in the answer, it
  would refuse the shim.

The shim serves versions 2 and 3 on one socket, so both answers are true, even for another
containerd's shim.

Source: containerd docs/runtime-v2.md, core/runtime/v2/shim.go parseStartResponse,
pkg/shim/compat.go.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterable
from typing import Final

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError

from api.proto.bootstrap_pb2 import BootstrapParams, BootstrapResult
from shim import bundle, files, sockets, syscalls
from shim.errors import (
    BundleUnusable,
    CoreSchedulingUnavailable,
    InvalidInvocation,
    InvalidRuntimeOptions,
    ServerNotStarted,
    ShimCgroupUnusable,
)
from shim.runtime.options import can_read, read_options
from shim.verbs import handover, unfinished
from shim.verbs.delete import finish_killed
from shim.verbs.invocation import Invocation, read_stdin

# Annotations that name the group, by precedence.
_GROUP_ANNOTATIONS: Final = ("io.containerd.runc.v2.group", "io.kubernetes.cri.sandbox-id")

_CGROUPS: Final = "/sys/fs/cgroup"
_HIGHEST_OOM_SCORE_ADJ: Final = 1000

# LogLevel of BootstrapParams: DEBUG is -4; lower levels log even more.
_DEBUG: Final = -4

_STANDARD: Final = 3  # descriptors


def start(invocation: Invocation, *, parent: int, waiting: socket.socket | None = None) -> bytes:
    """Execute the verb.

    Args:
        invocation: the flags. The current directory is the bundle.
        parent: the pid of the caller, which is containerd.
        waiting: the connection to a process that waits to become the shim, if any.

    Returns:
        The output for containerd.

    Raises:
        ShimError: there is no shim. Everything was undone.
    """
    request = read_stdin()
    params = read_bootstrap(request, invocation)
    bundle_path = os.getcwd()
    group = group_of(bundle_path, invocation.container_id)
    directory = sockets.prepare_directory(params.socket_dir if params else "")
    name = sockets.name_of(invocation.address, invocation.namespace, group)
    path = sockets.path_of(directory, name)
    own = sockets.name_of(invocation.address, invocation.namespace, invocation.container_id)
    finish_killed(directory, own, starting=True)
    listener = sockets.listen(path, container_id=invocation.container_id, bundle_path=bundle_path)
    try:
        _leave_in_bundle(bundle_path, directory, path)
        if listener is not None:
            shim = _describe_shim(invocation, params, bundle_path, path, parent)
            cgroup = shim_cgroup(request, params)
            _start_shim(listener, shim, cgroup, waiting)
    except BaseException:
        if listener is not None:
            sockets.remove_own(path, sockets.identity(path))
        sockets.forget(path, invocation.container_id)
        raise
    _finish_others(directory)
    return answer(sockets.SCHEME + path, params)


def group_of(bundle_path: str, container_id: str) -> str:
    """Return the group that a container or a sandbox belongs to.

    Args:
        bundle_path: the bundle.
        container_id: its id, the default group.

    Returns:
        The group's name; the id without config.json, as for a sandbox. Create reports a container's
        missing config.json.

    Raises:
        BundleUnusable: config.json cannot be read, or is malformed.
    """
    path = os.path.join(bundle_path, bundle.CONFIG)
    if not os.path.lexists(path):
        return container_id
    content = files.read(path, bundle.LONGEST_SPEC)
    # A spec without either name has no group, and needs no parsing. Go's encoder, which wrote the
    # file, does not escape these letters.
    if not any(name.encode() in content for name in _GROUP_ANNOTATIONS):
        return container_id
    annotations = files.parse_object(content, path).get("annotations")
    if isinstance(annotations, dict):
        for name in _GROUP_ANNOTATIONS:
            group = annotations.get(name)
            if isinstance(group, str) and group:
                return group
    return container_id


def answer(where: str, params: BootstrapParams | None) -> bytes:
    """Return the output for stdout.

    Args:
        where: the shim's address, with its scheme.
        params: containerd's parameters; None before 2.3.
    """
    if params is None:
        return where.encode()
    # Encode the last field last: containerd 2.3.0 to 2.3.3 strip white space from the answer before
    # they decode it.
    return BootstrapResult(version=3, address=where, protocol="ttrpc").SerializeToString()


def read_bootstrap(data: bytes, invocation: Invocation) -> BootstrapParams | None:
    """Parse stdin as BootstrapParams, if it has them.

    An older containerd writes the runtime's options, as an ``Any``, which may happen to decode as
    this message. So it counts only with the container and namespace of the flags.

    Args:
        data: the content of stdin.
        invocation: the flags.

    Returns:
        The message; None for an older containerd.

    Raises:
        InvalidInvocation: a path in it has a zero byte.
    """
    try:
        params = BootstrapParams.FromString(data)
    except DecodeError:
        return None
    named = params.instance_id, params.namespace
    if named != (invocation.container_id, invocation.namespace):
        return None
    for path in (
        params.containerd_ttrpc_address,
        params.containerd_grpc_address,
        params.socket_dir,
    ):
        if "\0" in path:
            raise InvalidInvocation(
                f"the path {path!r} in BootstrapParams", found="a zero byte", do="leave that out"
            )
    return params


def shim_cgroup(request: bytes, params: BootstrapParams | None) -> str:
    """Return the shim's cgroup in the runtime's options; "" for none.

    Unreadable options name none: Create also reads them, and reports the fault.

    Args:
        request: stdin, which has the options if containerd is older than 2.3.
        params: stdin from a later containerd.
    """
    options: Iterable[AnyMessage]
    try:
        if params is None:
            options = (AnyMessage.FromString(request),)
        else:
            options = (extension.value for extension in params.extensions)
        return next((read_options(each).shim_cgroup for each in options if can_read(each)), "")
    except (DecodeError, InvalidRuntimeOptions):
        return ""


def join_cgroup(name: str, pid: int, *, root: str = _CGROUPS) -> None:
    """Move a process into a cgroup, in each hierarchy that has it.

    Args:
        name: the cgroup's path below the root of its hierarchy.
        pid: the process.
        root: where cgroups are mounted.

    Raises:
        ShimCgroupUnusable: the cgroup does not exist, or accepts no process.
    """
    below = os.path.normpath("/" + name).lstrip("/")
    roots = [root]
    if not os.path.exists(os.path.join(root, "cgroup.controllers")):  # version 1
        roots = [os.path.join(root, controller) for controller in sorted(os.listdir(root))]
    files = [os.path.join(each, below, "cgroup.procs") for each in roots]
    present = [file for file in files if os.path.exists(file)]
    asked = f"to run the shim in cgroup {name}"
    if not present:
        raise ShimCgroupUnusable(asked, found=f"it is not below {root}", do="make it first")
    for file in present:
        try:
            with open(file, "wb", buffering=0) as procs:
                procs.write(str(pid).encode())
        except OSError as error:
            raise ShimCgroupUnusable(
                asked, found=f"{file}: {os.strerror(error.errno or 0).lower()}"
            ) from error


def _leave_in_bundle(bundle_path: str, directory: str, path: str) -> None:
    """Write the files for containerd up to 1.7, and for a later clean-up."""
    files.write(os.path.join(bundle_path, bundle.ADDRESS), (sockets.SCHEME + path).encode())
    link = os.path.join(bundle_path, bundle.SOCKET_DIRECTORY)
    try:
        files.remove(link)
        os.symlink(directory, link)
    except OSError as error:
        raise BundleUnusable(
            f"to write {link}", found=os.strerror(error.errno or 0).lower()
        ) from error


def _describe_shim(
    invocation: Invocation,
    params: BootstrapParams | None,
    bundle_path: str,
    socket_path: str,
    parent: int,
) -> handover.ShimRequest:
    # From containerd's parameters, or else from elsewhere.
    params = params or BootstrapParams()
    grpc_address = params.containerd_grpc_address or invocation.address
    ttrpc_address = params.containerd_ttrpc_address or os.environ.get("TTRPC_ADDRESS", "")
    return handover.ShimRequest(
        bundle_path=bundle_path,
        container_id=invocation.container_id,
        namespace=invocation.namespace,
        address=grpc_address,
        ttrpc_address=ttrpc_address or f"{grpc_address}.ttrpc",
        socket_path=socket_path,
        debug=invocation.debug or params.log_level <= _DEBUG,
        # The caller is containerd; the shim will have another parent once we exit.
        oom_score_adj=_oom_score_adj_below(parent),
        environment=dict(os.environ),
    )


def _oom_score_adj_below(pid: int) -> int | None:
    """Return an OOM score by which the shim dies before containerd; None if unknown."""
    try:
        with open(f"/proc/{pid}/oom_score_adj", "rb") as file:
            return min(int(file.read()) + 1, _HIGHEST_OOM_SCORE_ADJ)
    except (OSError, ValueError):
        return None


def _start_shim(
    listener: int, shim: handover.ShimRequest, cgroup: str, waiting: socket.socket | None
) -> None:
    isolated = bool(os.environ.get("SCHED_CORE"))
    if isolated:
        _isolate_core()  # a fork server does not do this for its children
    if isolated or waiting is None or not _hand_over(waiting, listener, shim, cgroup):
        _fork_shim(listener, shim, cgroup)


def _hand_over(
    waiting: socket.socket, listener: int, shim: handover.ShimRequest, cgroup: str
) -> bool:
    """Let the waiting process become the shim, or exit; return whether it became the shim."""
    with waiting:
        pid = handover.offer(waiting, listener, shim)
        if not pid:
            return False
        if cgroup:
            join_cgroup(cgroup, pid)  # on failure the waiting process exits
        return handover.commit(waiting)


def _fork_shim(listener: int, shim: handover.ShimRequest, cgroup: str) -> None:
    try:
        pid = os.fork()
    except OSError as error:
        raise ServerNotStarted(
            f"a shim for {shim.container_id}",
            found=os.strerror(error.errno or 0).lower(),
            do="look at the limits on memory and processes",
        ) from error
    if pid == 0:
        handover.become_shim(listener, shim)
    try:
        if cgroup:
            join_cgroup(cgroup, pid)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise


def _finish_others(directory: str) -> None:
    """Finish, in a child, killed ``delete`` verbs of other containers."""
    names = unfinished.names(directory)
    if not names:
        return
    try:
        if os.fork():
            return
    except OSError:
        return  # the next start tries again
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for fd in range(_STANDARD):
            os.dup2(null, fd)
        os.closerange(_STANDARD, os.sysconf("SC_OPEN_MAX"))
        for name in names:
            finish_killed(directory, name)
    finally:
        os._exit(0)


def _isolate_core() -> None:
    """Keep other processes off our hyper-threads; the shim and its containers inherit this."""
    try:
        syscalls.create_core_scheduling_domain()
    except OSError as error:
        raise CoreSchedulingUnavailable(
            "SCHED_CORE",
            found=os.strerror(error.errno or 0).lower(),
            do="unset it, or boot a kernel with core scheduling on a machine with SMT",
        ) from error
