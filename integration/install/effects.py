"""Run steps, each atomically, under a lock that one installer holds.

Data is on disk before anything refers to it, so that a power failure does no harm: the file system
is synced before a tree gets its final name, and a directory after one of its names has changed.

Source: rename(2), syncfs(2), flock(2), pidfd_open(2).
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from integration.files import sync_directory
from integration.install import copying, selftest, steps, usage
from integration.install.errors import (
    InstallerBusy,
    LabelFailed,
    NoSpace,
    PlaceReadOnly,
    StepFailed,
)
from integration.install.trees import known_tree
from integration.install.usage import Role
from integration.install_layout import (
    CURRENT,
    INCOMING,
    REMOVING,
    SELF_TEST,
    InstallLayout,
    new_link,
    working_name,
)
from integration.timeouts import PATIENCE
from shim import syscalls

# Seconds to wait for fork servers to exit.
_END: Final = 3.0 * PATIENCE
_POLL: Final = 0.02
_UMASK: Final = 0o022
# Seconds: a status query holds the lock for a moment.
_LOCK: Final = 0.5
_LABEL_TIMEOUT: Final = 120.0
_SELINUX: Final = "/sys/fs/selinux"
_SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(slots=True)
class Outcome:
    """The result of running steps."""

    completed: list[str] = field(default_factory=list)  # one line for each step
    collected: list[str] = field(default_factory=list)  # names of removed trees
    # names of trees that could not be removed because a process uses them
    in_use: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # for the user


@dataclass(frozen=True, slots=True)
class Installer:
    """Runs steps on an installation."""

    layout: InstallLayout
    say: Callable[[str], None] = lambda _: None  # receives each step before it runs
    runtime: str = ""  # the low-level runtime for the self-test; empty for the node's
    # processes that do not keep a tree from being removed, such as the uninstaller itself
    ignored_pids: frozenset[int] = frozenset()
    selinux: str = _SELINUX  # SELinux' file system, if SELinux is on
    path: str = _SYSTEM_PATH  # the search path of the node's programs

    def run(self, plan: Sequence[steps.Step]) -> Outcome:
        """Run steps in order.

        Raises:
            InstallError: a step failed. The steps before it are done, those after it are not.
        """
        outcome = Outcome()
        for step in plan:
            self.say(str(step))
            try:
                self._run_step(step, outcome)
            except OSError as error:
                raise _failed(step, error) from error
            outcome.completed.append(str(step))
        return outcome

    def _run_step(self, step: steps.Step, outcome: Outcome) -> None:
        match step:
            case steps.Clear(path):
                self._clear(path)
            case steps.Put(source, name):
                self._put(source, name, outcome)
            case steps.Test(name, new):
                self._test(name, new=new)
            case steps.Point(link, name):
                _replace_link(self.layout.path(link), name)
            case steps.Link(path, target):
                _make_directory(os.path.dirname(path))
                _replace_link(path, target)
                self._label(path, outcome)
            case steps.Unlink(path):
                _unlink(path)
            case steps.EndForkServers(names):
                end_fork_servers([self.layout.path(name) for name in names])
            case steps.Collect(name):
                gone = self._collect(name)
                (outcome.collected if gone else outcome.in_use).append(name)
            case steps.RemovePrefix(path):
                with suppress(OSError):  # it is not empty, which the caller reports
                    os.rmdir(path)

    def _clear(self, path: str) -> None:
        if os.path.basename(path).startswith(SELF_TEST):
            selftest.clean(path)
        if os.path.basename(path).startswith(REMOVING) and self._is_used(path):
            # An installer was killed between renaming a tree that is in use and restoring it.
            tree = known_tree(path)
            if tree is not None and not os.path.lexists(self.layout.path(tree.name)):
                os.rename(path, self.layout.path(tree.name))
        elif os.path.islink(path):
            _unlink(path)
        elif os.path.exists(path):
            shutil.rmtree(path)

    def _put(self, source: str, name: str, outcome: Outcome) -> None:
        incoming = self.layout.path(working_name(INCOMING))
        os.mkdir(incoming, 0o700)
        try:
            if copying.is_archive(source):
                tree = copying.unpack(source, incoming)
            else:
                tree = copying.source_tree(source)
                copying.copy_tree(tree, source, incoming, self.say)
            copying.verify_copy(tree, incoming, name)
            _sync_file_system(incoming)
            os.rename(incoming, self.layout.path(name))
        except BaseException:
            shutil.rmtree(incoming, ignore_errors=True)
            raise
        sync_directory(self.layout.prefix)
        try:
            self._label(self.layout.path(name), outcome)
        except BaseException:
            self._collect(name)
            raise

    def _test(self, name: str, *, new: bool) -> None:
        try:
            selftest.check_configuration(
                self.layout.path(name), self.layout.path(CURRENT), path=self.path
            )
            selftest.run(
                self.layout.path(name),
                self.layout.path(working_name(SELF_TEST)),
                runtime=self.runtime,
                path=self.path,
            )
        except BaseException:
            if new:
                self._collect(name)
            raise

    def _collect(self, name: str) -> bool:
        """Remove a tree unless it is used; return whether it is gone."""
        path = self.layout.path(name)
        if not os.path.lexists(path):
            return True
        if self._is_used(path):
            return False
        # No new process can start from the old path; one that just did shows up in the check.
        moved = self.layout.path(working_name(REMOVING))
        os.rename(path, moved)
        if self._is_used(moved):
            os.rename(moved, path)
            return False
        shutil.rmtree(moved)
        return True

    def _is_used(self, path: str) -> bool:
        return any(user.pid not in self.ignored_pids for user in usage.users([path]))

    def _label(self, path: str, outcome: Outcome) -> None:
        """Apply the SELinux policy's labels to new files, if SELinux is on.

        Systems without restorecon have one label for such a directory.
        """
        if not os.path.exists(os.path.join(self.selinux, "enforce")):
            return
        action = f"to set the SELinux labels of {path}"
        program = shutil.which("restorecon", path=self.path)
        if program is None:
            outcome.warnings.append(f"SELinux is on, and there is no restorecon to label {path}")
            return
        argv = [program, "-R", path]
        try:
            ended = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_LABEL_TIMEOUT,
                check=False,
                env={"PATH": self.path, "LC_ALL": "C"},
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LabelFailed(action, found=str(error)) from error
        if ended.returncode:
            raise LabelFailed(action, found=ended.stderr.strip() or f"status {ended.returncode}")


@contextmanager
def locked(prefix: str, *, make: bool) -> Iterator[None]:
    """Hold the installer lock of a prefix.

    Args:
        prefix: the directory.
        make: whether to create a missing directory; if it is missing otherwise, nothing is locked.

    Raises:
        InstallerBusy: another installer holds the lock.
        StepFailed: the directory cannot be created.
    """
    made = make and not os.path.exists(prefix)
    try:
        fd = _lock(prefix, make=make)
    except OSError as error:
        raise StepFailed(
            f"to work on {prefix}",
            found=os.strerror(error.errno or 0).lower(),
            do="choose another --prefix",
        ) from error
    umask = os.umask(_UMASK)  # all users may read what is installed
    try:
        yield
    except BaseException:
        if made:
            with suppress(OSError):  # it is not empty
                os.rmdir(prefix)
        raise
    finally:
        os.umask(umask)
        if fd >= 0:
            os.close(fd)


def _lock(prefix: str, *, make: bool) -> int:
    """Open and lock the directory; return -1 if it is missing and not to be created."""
    deadline = time.monotonic() + _LOCK
    while True:
        if make:
            _make_directory(prefix)
        try:
            fd = os.open(prefix, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            if make:
                continue  # it was removed just now
            return -1
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same_directory(fd, prefix):
                return fd
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                os.close(fd)
                raise InstallerBusy(
                    f"to work on {prefix}",
                    found="another installer is working there",
                    do="wait until it has finished",
                ) from error
            time.sleep(_POLL)
        os.close(fd)


def is_locked(prefix: str) -> bool:
    """Whether an installer is working below a prefix."""
    try:
        fd = os.open(prefix, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # Shared, so that two queries do not disturb each other.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def end_fork_servers(trees: Sequence[str], *, proc: str = usage.PROC) -> None:
    """Tell the fork servers of trees to exit, and wait a moment for them.

    Their spare processes exit with them and get no signal: a spare may already be a verb that
    containerd waits for, and later a shim. If a server does not exit, its tree merely stays.
    """
    waiting = [fd for user in usage.users(trees, proc=proc) if (fd := _terminate(user)) >= 0]
    deadline = time.monotonic() + _END
    try:
        while waiting and time.monotonic() < deadline:
            found = usage.users(trees, proc=proc)
            if not any(user.role in {Role.FORK_SERVER, Role.SPARE} for user in found):
                return
            time.sleep(_POLL)
    finally:
        for fd in waiting:
            os.close(fd)


def _terminate(user: usage.User) -> int:
    """Send SIGTERM to a fork server and return its pidfd; -1 if it is gone or another process."""
    if user.role is not Role.FORK_SERVER:
        return -1
    try:
        fd = os.pidfd_open(user.pid)
    except ProcessLookupError:
        return -1
    # The pid may have been reused since the process was found.
    again = [u for u in usage.users([user.tree]) if u.pid == user.pid]
    if again == [user]:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGTERM)
    return fd


def _make_directory(path: str) -> None:
    umask = os.umask(_UMASK)
    try:
        os.makedirs(path, mode=0o755, exist_ok=True)
    finally:
        os.umask(umask)


def _is_same_directory(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _replace_link(path: str, target: str) -> None:
    new = new_link(path)
    with suppress(FileNotFoundError):
        os.unlink(new)
    os.symlink(target, new)
    os.rename(new, path)
    sync_directory(os.path.dirname(path))


def _unlink(path: str) -> None:
    try:
        if not stat.S_ISLNK(os.lstat(path).st_mode):
            return  # replaced by something that is not ours
        os.unlink(path)
    except FileNotFoundError:
        return
    sync_directory(os.path.dirname(path))


def _sync_file_system(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        syscalls.sync_file_system(fd)
    finally:
        os.close(fd)


def _failed(step: steps.Step, error: OSError) -> Exception:
    action = f"to {step}"
    found = f"{error.filename or ''}: {os.strerror(error.errno or 0).lower()}".lstrip(": ")
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return NoSpace(action, found=found, do="make room, and run it again")
    if error.errno == errno.EROFS:
        return PlaceReadOnly(action, found=found, do="mount it writable, and run it again")
    return StepFailed(action, found=found, do="run it again")
