"""``start``: give containerd the address of a shim, and start one if the pod has none.

The socket listens before the shim has even begun to import its modules: containerd's first
connection waits in the backlog. The answer is in the dialect that was spoken:

- a containerd from 2.3 on writes BootstrapParams to stdin, and reads a BootstrapResult of
  version 3;
- every older one gets the bare address. All of them understand it (1.6 nothing else; from
  1.7 on, what is no JSON is an address, of version 2 and ttrpc, which is what we would
  write there). Version 3 said to one of those would make it refuse the shim.

The shim serves versions 2 and 3 on one socket, so both answers are true, also for a shim
that another containerd started.

Source: containerd docs/runtime-v2.md, core/runtime/v2/shim.go parseStartResponse,
pkg/shim/compat.go.
"""

from __future__ import annotations

import os

from shim import address, bundle, sockets, warmstart, wire
from shim.detach import become_server, oom_score_adj_below
from shim.errors import (
    BundleUnusable,
    CoreSchedulingUnavailable,
    ServerNotStarted,
    ShimCgroupUnusable,
)
from shim.handleroptions import text_option

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

    from shim.invocation import Invocation
    from shim.wire import BootstrapParams

# The C module under signal: the public one imports enum, which costs 6 ms.
if TYPE_CHECKING:
    import signal as _signal
else:
    import _signal

_CGROUPS: Final = "/sys/fs/cgroup"


def start(invocation: Invocation) -> bytes:
    """Do the verb.

    Args:
        invocation: the flags. The current directory is the bundle.

    Returns:
        What containerd wants to read on stdout.

    Raises:
        ShimError: there is no shim to give an address of. Nothing of ours is left.
    """
    request = wire.read_request(0)
    params = wire.read_bootstrap(
        request, container_id=invocation.container_id, namespace=invocation.namespace
    )
    bundle_path = os.getcwd()
    group = address.group_of(bundle_path, invocation.container_id)
    directory = sockets.prepare_directory(
        address.socket_directories(params.socket_dir if params else "", os.environ, os.geteuid())
    )
    name = address.socket_name(invocation.address, invocation.namespace, group)
    path = address.socket_path(directory, name)
    listener = sockets.join(path, invocation.container_id, bundle_path)
    try:
        _leave_in_bundle(bundle_path, directory, path)
        if listener is not None:
            cgroup = text_option(
                params.extensions if params else _legacy_options(request), "ShimCgroup"
            )
            _start_shim(
                listener,
                invocation,
                params,
                bundle_path=bundle_path,
                socket_path=path,
                cgroup=cgroup,
            )
    except BaseException:
        if listener is not None:
            sockets.remove_own(path, sockets.identity(path))
        sockets.forget(path, invocation.container_id)
        raise
    return answer(address.SCHEME + path, params)


def answer(where: str, params: BootstrapParams | None) -> bytes:
    """What to write on stdout.

    Args:
        where: the shim's address, with its scheme.
        params: what containerd wrote; None if it is one from before 2.3.
    """
    return wire.bootstrap_result(where) if params else where.encode()


def join_cgroup(name: str, pid: int, *, root: str = _CGROUPS) -> None:
    """Put a process in a cgroup, in each hierarchy that has it.

    Args:
        name: the cgroup's path below the root of its hierarchy.
        pid: the process.
        root: where cgroups are mounted.

    Raises:
        ShimCgroupUnusable: there is no such cgroup, or it takes no process.
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


def _legacy_options(request: bytes) -> list[tuple[str, bytes]]:
    """The options that an older containerd writes; none if it is something else."""
    try:
        return [wire.read_any(request)]
    except ValueError:
        return []


def _leave_in_bundle(bundle_path: str, directory: str, path: str) -> None:
    """Write what containerd up to 1.7, and a clean-up after us, look for."""
    bundle.write(os.path.join(bundle_path, bundle.ADDRESS), (address.SCHEME + path).encode())
    link = os.path.join(bundle_path, bundle.SOCKET_DIRECTORY)
    try:
        bundle.remove(link)
        os.symlink(directory, link)
    except OSError as error:
        raise BundleUnusable(
            f"to write {link}", found=os.strerror(error.errno or 0).lower()
        ) from error


def _start_shim(
    listener: int,
    invocation: Invocation,
    params: BootstrapParams | None,
    *,
    bundle_path: str,
    socket_path: str,
    cgroup: str,
) -> None:
    grpc_address = (params.grpc_address if params else "") or invocation.address
    # What containerd says in its parameters; if that is nothing, what it says in the environment.
    ttrpc_address = (params.ttrpc_address if params else "") or os.environ.get("TTRPC_ADDRESS", "")
    request = warmstart.Request(
        bundle_path=bundle_path,
        container_id=invocation.container_id,
        namespace=invocation.namespace,
        address=grpc_address,
        ttrpc_address=ttrpc_address or f"{grpc_address}.ttrpc",
        socket_path=socket_path,
        debug=invocation.debug or (params is not None and params.debug),
        # Who asks is containerd; the shim's parent will be somebody else once we are gone.
        oom_score_adj=oom_score_adj_below(invocation.parent),
        environment=dict(os.environ),
    )
    isolated = bool(os.environ.get("SCHED_CORE"))
    if isolated:
        _isolate_core()  # which a fork server has not done for its children
    if invocation.warm:
        # It was forked to be the shim, and has nothing to do but this verb before.
        if cgroup:
            join_cgroup(cgroup, os.getpid())
        invocation.afterwards = lambda: become_server(listener, request)
        return
    pid = 0
    if not isolated and warmstart.enabled():
        server = warmstart.server_path(os.path.dirname(socket_path), grpc_address)
        pid = warmstart.ask(server, listener, request) if server else 0
        if server and not pid:
            pid = _fork_shim(listener, request)
            warmstart.leave_behind(server, grpc_address)
    pid = pid or _fork_shim(listener, request)
    if cgroup:
        try:
            join_cgroup(cgroup, pid)
        except BaseException:
            os.kill(pid, _signal.SIGKILL)
            raise


def _fork_shim(listener: int, request: warmstart.Request) -> int:
    try:
        pid = os.fork()
    except OSError as error:
        raise ServerNotStarted(
            f"a shim for {request.container_id}",
            found=os.strerror(error.errno or 0).lower(),
            do="look at the limits on memory and processes",
        ) from error
    if pid == 0:
        become_server(listener, request)
    return pid


def _isolate_core() -> None:
    """Share hyper-threads with nobody; the shim and its containers inherit it."""
    from shim import syscalls  # noqa: PLC0415 - 4 ms, and only for who sets this

    try:
        syscalls.create_core_scheduling_domain()
    except OSError as error:
        raise CoreSchedulingUnavailable(
            "SCHED_CORE",
            found=os.strerror(error.errno or 0).lower(),
            do="unset it, or boot a kernel with core scheduling on a machine with SMT",
        ) from error
