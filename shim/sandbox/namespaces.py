"""Create a pod's namespaces, and the process that holds them.

Two processes are forked. The *maker* joins or creates the user and network namespaces and unshares
the others. A new pid namespace applies only to its children, so it forks the *holder*, as a child
of the shim, and exits. The holder sets the pod's sysctls and hostname from inside, moves to its own
root with a single file in it, gives up all privileges and executes that file
(:mod:`shim.sandbox.holder`).

Rules
- The holder shows the pod nothing of the node: its root is empty, it has no environment and no
  descriptors, and its user is 65534. Only a process with CAP_SYS_PTRACE can trace it, and the
  system call filter limits what that process can do with it.
- The holder dies with the shim, however the shim ends.
- The holder stays in the shim's cgroup: it uses hardly any time or memory, and the pod's OOM killer
  cannot choose it.
- A failure is reported to the shim over a pipe, in one line, and everything is undone.

Source: namespaces(7), pid_namespaces(7), user_namespaces(7), mount_namespaces(7),
ioctl_ns(2), clone(2) CLONE_PARENT, prctl(2) PR_SET_PDEATHSIG, pivot_root(2), netdevice(7).
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import socket
import struct
from collections.abc import Sequence
from typing import Final, NoReturn

from shim import forked, loop, syscalls
from shim.children import Child, Reaper
from shim.sandbox import holder
from shim.sandbox.errors import NamespacesUnavailable
from shim.sandbox.pod import IdMapping, Pod, sysctl_path

# Seconds for both together, which take some milliseconds.
_TIMEOUT: Final = 10.0
_DYING: Final = 5.0

# Not 65534: a container may run as that user, and could then send signals.
_NOBODY: Final = 65535

# Seconds of processor time. It needs none; this bounds an attacker who makes it loop.
_PROCESSOR_TIME: Final = 10

_NS_GET_USERNS: Final = 0xB701
_NS_GET_NSTYPE: Final = 0xB703

_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
_IFF_UP: Final = 1
_INTERFACE_FLAGS: Final = struct.Struct("16sH14x")

# The holder's root: a file, its directory, and no room for more.
_ROOT_OPTIONS: Final = "mode=0555,size=64k,nr_inodes=2"


async def hold(reaper: Reaper, pod: Pod) -> Child:
    """Create a pod's namespaces.

    Args:
        reaper: collects the processes.
        pod: the namespaces and their configuration.

    Returns:
        The holder. The namespaces are in ``/proc/PID/ns`` as long as it lives.

    Raises:
        NamespacesUnavailable: the kernel refused, or the network namespace does not exist.
        MachineUnsupported: there is no holder for this architecture.
    """
    machine = holder.machine()
    network = _open_network(pod)
    try:
        reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        # A holder that fails at once may exit before its pid is known.
        with reaper.window():
            try:
                maker = reaper.register(_fork_maker(pod, machine, network, writing))
            except BaseException:
                os.close(reading)
                raise
            finally:
                os.close(writing)
            try:
                report, in_time = await forked.read_report(reading, timeout=_TIMEOUT)
                if not in_time:
                    report += forked.FAILED + f"not made after {_TIMEOUT} s".encode()
            except BaseException:
                _kill(maker)
                raise
            finally:
                os.close(reading)
            first, _, failure = report.partition(b"\n")
            child = reaper.register(int(first)) if first.isdigit() else None
    finally:
        if network >= 0:
            os.close(network)
    if failure or child is None:
        _kill(maker)
    ended = await maker.wait()
    if failure or child is None or _has_ended(child):
        if child is not None:
            _kill(child)
            with loop.move_on_after(_DYING):
                await child.wait()
        reason = (failure or report).removeprefix(forked.FAILED).decode(errors="replace").strip()
        raise NamespacesUnavailable(
            "the namespaces of a pod",
            found=reason or f"a process ended without a report, with status {ended.status}",
            do="the kernel's log, and the limits below /proc/sys/user, may say more",
        )
    return child


def _open_network(pod: Pod) -> int:
    if not pod.network_path:
        return -1
    asked = f"the network namespace {pod.network_path}"
    do = "let containerd's CRI make it"
    try:
        fd = os.open(pod.network_path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        found = os.strerror(error.errno or 0).lower()
        raise NamespacesUnavailable(asked, found=found, do=do) from error
    try:
        kind = fcntl.ioctl(fd, _NS_GET_NSTYPE)
    except OSError:
        kind = 0
    if kind != syscalls.CLONE_NEWNET:
        os.close(fd)
        raise NamespacesUnavailable(asked, found="something else at that path", do=do)
    return fd


def _has_ended(child: Child) -> bool:
    if child.exit is not None:
        return True
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, child.pid, flags) is not None


def _kill(child: Child) -> None:
    if child.exit is None:
        os.kill(child.pid, signal.SIGKILL)  # not reaped, so the pid is still its own


# -- in the maker ----------------------------------------------------------------------------


def _fork_maker(pod: Pod, machine: holder.Machine, network: int, report: int) -> int:
    shim = os.getpid()
    return forked.fork(lambda: _be_maker(shim, pod, machine, network, report))


def _be_maker(shim: int, pod: Pod, machine: holder.Machine, network: int, report: int) -> NoReturn:
    doing = "to start"
    try:
        # No other descriptor of the shim may reach the holder.
        forked.set_up_child(shim, {report, network})
        os.set_blocking(report, True)
        os.setsid()
        if pod.uids:
            doing = "a user namespace"
            _enter_user_namespace(pod, network)
        if network >= 0:
            doing = f"to join {pod.network_path}"
            syscalls.setns(network, syscalls.CLONE_NEWNET)
        doing = "to unshare namespaces"
        syscalls.unshare(_unshared(pod))
        doing = "to fork the holder"
        pid = syscalls.clone_sibling()
    except BaseException as error:  # noqa: BLE001 - there is no caller to raise it to
        forked.fail(report, doing, error)
    if pid == 0:
        _be_holder(pod, machine, report)
    os.write(report, b"%d\n" % pid)
    os._exit(0)


def _unshared(pod: Pod) -> int:
    flags = syscalls.CLONE_NEWNS
    if pod.own_network:
        flags |= syscalls.CLONE_NEWUTS
        if not pod.network_path:
            flags |= syscalls.CLONE_NEWNET
    if pod.own_ipc:
        flags |= syscalls.CLONE_NEWIPC
    if pod.own_pid:
        flags |= syscalls.CLONE_NEWPID
    return flags


def _enter_user_namespace(pod: Pod, network: int) -> None:
    """Become root of the pod's user namespace.

    containerd creates the network namespace in the user namespace that owns it. Only root of that
    user namespace may change the network, or mount its sysfs.
    """
    if network >= 0:
        owner = fcntl.ioctl(network, _NS_GET_USERNS)
        try:
            if os.fstat(owner).st_ino != os.stat("/proc/self/ns/user").st_ino:
                syscalls.setns(owner, syscalls.CLONE_NEWUSER)
                _become(0)
                return
        finally:
            os.close(owner)
    _make_user_namespace(pod)
    _become(0)


def _make_user_namespace(pod: Pod) -> None:
    # Only a process outside can write such mappings.
    made = os.pipe()
    myself = os.getpid()
    writer = os.fork()
    if writer == 0:
        try:
            os.close(made[1])
            if os.read(made[0], 1):
                _write_mapping(f"/proc/{myself}/gid_map", pod.gids)
                _write_mapping(f"/proc/{myself}/uid_map", pod.uids)
                os._exit(0)
        finally:
            os._exit(1)
    syscalls.unshare(syscalls.CLONE_NEWUSER)
    os.write(made[1], b".")
    os.close(made[0])
    os.close(made[1])
    if os.waitpid(writer, 0)[1] != 0:
        raise OSError(0, "the ids could not be mapped")


def _write_mapping(path: str, mappings: Sequence[IdMapping]) -> None:
    text = "".join(f"{m.inside} {m.outside} {m.count}\n" for m in mappings)
    with open(path, "wb", buffering=0) as file:
        file.write(text.encode())


def _become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


# -- in the holder ---------------------------------------------------------------------------


def _be_holder(pod: Pod, machine: holder.Machine, report: int) -> NoReturn:
    doing = "to start"
    try:
        forked.close_others({report})
        syscalls.die_with_parent(signal.SIGKILL)
        if _nobody_reads(report):
            os._exit(1)  # the shim has died meanwhile
        if pod.own_network and not pod.network_path:
            doing = "to bring the loopback interface up"
            _bring_up("lo")
        for name, value in pod.sysctls:
            doing = f"to set sysctl {name} to {value!r}"
            _set_sysctl(name, value)
        if pod.hostname:
            doing = f"to name the pod {pod.hostname!r}"
            socket.sethostname(pod.hostname)
        doing = "to leave the node's root"
        _leave_root(holder.program(machine))
        doing = "to give up privileges"
        # In a user namespace with a single id, that is root's.
        syscalls.deprive_root()
        _become(_nobody(pod))
        # Changing the user has reset it.
        syscalls.die_with_parent(signal.SIGKILL)
        if _nobody_reads(report):
            os._exit(1)
        _limit()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        syscalls.set_no_new_privileges()
        instructions = holder.system_call_filter(machine)
        doing = "to execute the holder"
        syscalls.filter_system_calls(instructions)
        os.execve(f"/{holder.NAME}", [holder.NAME], {})  # noqa: S606 - a program of ours
    except BaseException as error:  # noqa: BLE001 - there is no caller to raise it to
        forked.fail(report, doing, error)


def _nobody_reads(report: int) -> bool:
    poll = select.poll()
    poll.register(report, 0)
    return bool(poll.poll(0))  # POLLERR


def _bring_up(interface: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as control:
        request = _INTERFACE_FLAGS.pack(interface.encode(), 0)
        _, flags = _INTERFACE_FLAGS.unpack(fcntl.ioctl(control, _SIOCGIFFLAGS, request))
        request = _INTERFACE_FLAGS.pack(interface.encode(), flags | _IFF_UP)
        fcntl.ioctl(control, _SIOCSIFFLAGS, request)


def _set_sysctl(name: str, value: str) -> None:
    # What /proc/sys shows depends on the namespaces of the process, not on the mount.
    path = os.path.join("/proc/sys", *sysctl_path(name))
    with open(path, "wb", buffering=0) as file:
        file.write(value.encode())


def _leave_root(program: bytes) -> None:
    """Move to a root with only the program in it, without the node's mounts."""
    syscalls.mount("", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE)
    # Even root of a user namespace can enter /proc, which is no longer needed.
    syscalls.mount("tmpfs", "/proc", "tmpfs", _ROOT_FLAGS, _ROOT_OPTIONS)
    os.chdir("/proc")
    fd = os.open(holder.NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o700)
    os.write(fd, program)
    # A process that may not read its program cannot be traced or inspected.
    os.fchmod(fd, 0o111)
    os.close(fd)
    flags = _ROOT_FLAGS | syscalls.MS_REMOUNT | syscalls.MS_RDONLY
    syscalls.mount("", "/proc", "", flags, _ROOT_OPTIONS)
    syscalls.pivot_root_here()


_ROOT_FLAGS: Final = syscalls.MS_NOSUID | syscalls.MS_NODEV


def _nobody(pod: Pod) -> int:
    """Return a user without rights: the usual one, or the highest in the pod's namespace."""
    if not pod.uids:
        return _NOBODY
    return min(_NOBODY, *(_highest(mappings) for mappings in (pod.uids, pod.gids)))


def _highest(mappings: Sequence[IdMapping]) -> int:
    return next(m.count - 1 for m in mappings if m.inside == 0)


def _limit() -> None:
    for which, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 0),
        (resource.RLIMIT_CPU, _PROCESSOR_TIME),
    ):
        resource.setrlimit(which, (value, value))
