"""Do the work of a call of runc or crun without calling it, where its effect is known.

A call costs 6 to 10 ms, most of it for starting the runtime itself. Some calls do little more than
touch a few files:

``start``
    Init waits at a fifo in the runtime's state directory. runc's init writes a byte into it as soon
    as there is a reader; crun's init reads a byte from it. The fifo is then removed, which makes
    the container "running" for the runtime.
``kill``
    Init is signalled. (Runtimes do more with ``--all``, if some of the container's processes
    survive init's death, and in a frozen cgroup.)
``delete``
    The directories of the cgroup, and the state directory, are removed.

Rules
- The runtime must be the program that init still executes while it waits, so that it is not a
  wrapper with other effects. Every key of its state directory must be known
  (:mod:`shim.runtime.statedir`), and the directory must be our init's.
- Calls with other effects are left to the runtime: hooks, systemd's units, resctrl, processes that
  outlive init, cgroups with other processes. Nothing changes before it is certain that the rest is
  possible, or that the runtime can continue from there.
- If anything is unexpected, the runtime is called after all, and reports the error.
- With ``NVSHIM_STAND_INS=0`` in containerd's environment every call goes to the runtime.

Source: runc libcontainer Container.Exec, destroy, standard_init_linux.go; Container.Signal; crun
libcrun_container_start, libcrun_container_kill, libcrun_container_delete; fifo(7).
"""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Sequence
from typing import Final

from shim import loop, programs
from shim.children import Child
from shim.runtime import statedir
from shim.runtime.statedir import Kind, RuntimeState

VARIABLE: Final = "NVSHIM_STAND_INS"

_NAMES: Final = {"runc": Kind.RUNC, "crun": Kind.CRUN}

# How a runtime names its first copy of itself in memory.
_COPY: Final = "_cloned:/proc/self/exe (deleted)"

# The hooks of a runtime's start: crun runs the first; init the second.
_OF_START: Final = frozenset({"poststart", "startcontainer"})
_OF_DELETE: Final = frozenset({"poststop"})

# Seconds between checks of an init that has not opened the fifo, as in runc.
_LOOK: Final = 0.1

# The pauses between attempts to remove a cgroup that still has its last process.
_BUSY: Final = (0.001, 0.002, 0.004, 0.008, 0.016)

# The link count of a directory without subdirectories.
_CHILDLESS: Final = 2


class FastPath:
    """The fast path for one container's runtime calls. Construct it while its init waits.

    Args:
        binary: the runtime to replace.
        directory: the runtime's state directory of the container.
        init: the container's init process.
        systemd_cgroup: whether systemd manages the cgroup.
    """

    def __init__(self, binary: str, directory: str, init: Child, *, systemd_cgroup: bool) -> None:
        self._directory = directory
        self._init = init
        self._systemd_cgroup = systemd_cgroup
        self._start_time: int | None = None
        program = programs.find(binary)
        kind = _NAMES.get(os.path.basename(program or "").partition(".")[0].partition("-")[0])
        stands_in = os.environ.get(VARIABLE) != "0" and program and _executes(init.pid, program)
        # None if all calls go to the runtime.
        self._kind = kind if stands_in else None

    async def start(self) -> bool:
        """Make init execute its program.

        Returns:
            Whether it does. If not, nothing has changed, and the runtime must be called.
        """
        init, state = self._init, self._state()
        if state is None or init.exit is not None or state.hooks & _OF_START:
            return False
        # runc refuses, and waiting for init would last until a thaw.
        if _is_frozen(state.cgroups):
            return False
        path = os.path.join(self._directory, statedir.FIFO)
        try:
            if state.kind is Kind.CRUN:
                return _tell(path)
            return await _hear(path, init)
        except OSError:
            return False

    def kill(self, signum: int) -> bool:
        """Signal init.

        Args:
            signum: the signal.

        Returns:
            Whether it was signalled. If not, the runtime must be called.
        """
        init, state = self._init, self._state()
        if state is None or not state.own_pids or not init.runs():
            return False
        # A process frozen with version 1 does not die before a thaw, and some releases of runc do
        # not signal it.
        if signum == signal.SIGKILL and self._systemd_cgroup:
            return False
        if _is_frozen(state.cgroups):
            return False
        os.kill(init.pid, signum)
        return True

    async def delete(self) -> bool:
        """Remove the cgroup and the runtime's state of a container whose init was reaped.

        Returns:
            Whether nothing is left. Otherwise the runtime must be called.
        """
        state = self._state()
        if self._init.exit is None or state is None:
            return False
        if self._systemd_cgroup or not state.plain or state.hooks & _OF_DELETE:
            return False
        try:
            for directory in state.cgroups:
                await _remove_cgroup(directory)
            statedir.remove(self._directory)
        except OSError:
            return False
        return True

    def _state(self) -> RuntimeState | None:
        if self._kind is None:
            return None
        state = statedir.read(self._directory)
        if state is None or state.kind is not self._kind or state.pid != self._init.pid:
            return None
        # A manually created container of that name may have the pid of a reaped one.
        if self._start_time is None:
            self._start_time = state.start_time
        return state if state.start_time == self._start_time else None


def _executes(pid: int, program: str) -> bool:
    """Whether a process executes a program, or the program's copy of itself.

    runc and crun protect themselves from containers with a bind mount or an overlay, which have the
    file's times, or with a copy in memory, which has the file's size.
    """
    try:
        file, executed = os.stat(program), os.stat(f"/proc/{pid}/exe")
        if file.st_size != executed.st_size:
            return False
        if file.st_mtime_ns == executed.st_mtime_ns:
            return True
        name = os.readlink(f"/proc/{pid}/exe")
        return name.startswith("/memfd:") and name.endswith(_COPY)
    except OSError:
        return False


def _is_frozen(cgroups: Sequence[str]) -> bool:
    """Whether a cgroup may be frozen, with either version."""
    for directory in cgroups:
        for name, thawed in (("freezer.state", b"THAWED"), ("cgroup.freeze", b"0")):
            path = os.path.join(directory, name)
            if not os.access(path, os.F_OK):  # most hierarchies have neither
                continue
            try:
                with open(path, "rb", buffering=0) as file:
                    if file.read(16).strip() != thawed:
                        return True
            except OSError:
                return True
    return False


def _open_fifo(path: str, mode: int) -> int:
    """Open a fifo without waiting for the other end.

    Raises:
        OSError: it is not a fifo, is gone, or has no reader for the byte.
    """
    fd = os.open(path, mode | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileNotFoundError(path)
    return fd


def _tell(path: str) -> bool:
    """Start crun's init, which has the fifo open and reads."""
    fd = _open_fifo(path, os.O_WRONLY)
    try:
        os.unlink(path)
        os.write(fd, b"\0")
    finally:
        os.close(fd)
    return True


async def _hear(path: str, init: Child) -> bool:
    """Start runc's init, which opens the fifo, writes, and closes it by its exec."""
    fd = _open_fifo(path, os.O_RDONLY)
    heard = b""
    try:
        # The end of the fifo comes only after init has written. Do not wait if it has died before.
        while True:
            with loop.move_on_after(_LOOK) as patience:
                await loop.wait_readable(fd)
            try:
                said = os.read(fd, 1)
            except BlockingIOError:
                continue
            heard += said
            if not said and (not patience.cancelled_caught or init.exit is not None):
                break
    finally:
        os.close(fd)
    if heard:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass  # another client has started it
    return bool(heard)


async def _remove_cgroup(directory: str) -> None:
    """Remove an empty cgroup.

    Raises:
        OSError: it is not empty, and does not become empty.
    """
    for pause in (*_BUSY, None):
        try:
            os.rmdir(directory)
        except FileNotFoundError:
            return
        except OSError:
            # Cgroups that it has created below itself outlive its processes.
            if pause is None or os.stat(directory).st_nlink > _CHILDLESS:
                raise
            await loop.sleep(pause)
        else:
            return
