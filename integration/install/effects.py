"""Takes steps, each whole or not at all, under a lock that one installer holds.

What has to outlast a loss of power is on the disk before anything leads to it: the file system is
synced before a tree gets its name, and a directory after a name in it has changed.

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
    INCOMING,
    REMOVING,
    SELF_TEST,
    InstallLayout,
    new_link,
    working_name,
)
from integration.timeouts import PATIENCE
from shim import syscalls

# Seconds that fork servers get to end.
_END: Final = 3.0 * PATIENCE
_POLL: Final = 0.02
_UMASK: Final = 0o022
# Seconds: who only looks whether somebody works there holds the lock for a moment.
_LOCK: Final = 0.5
_LABEL_TIMEOUT: Final = 120.0
_SELINUX: Final = "/sys/fs/selinux"
_SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(slots=True)
class Outcome:
    """What came of the steps."""

    completed: list[str] = field(default_factory=list)  # what was done, one line for each step
    collected: list[str] = field(default_factory=list)  # names of trees that are gone
    # names of trees that should have gone, and are used
    in_use: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # what a person should know


@dataclass(frozen=True, slots=True)
class Installer:
    """Where and how steps are taken."""

    layout: InstallLayout  # where
    say: Callable[[str], None] = lambda _: None  # told each step before it is taken
    runtime: str = ""  # the low-level runtime that a self-test uses; empty for the node's
    # processes that may use a tree that is removed: the one that removes it
    ignored_pids: frozenset[int] = frozenset()
    selinux: str = _SELINUX  # where SELinux' file system is, if it is on
    path: str = _SYSTEM_PATH  # the search path of programs of the node

    def run(self, plan: Sequence[steps.Step]) -> Outcome:
        """Take steps in their order.

        Raises:
            InstallError: one could not be taken; those before it are, those after it are not.
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
                with suppress(OSError):  # something is in it, which is said elsewhere
                    os.rmdir(path)

    def _clear(self, path: str) -> None:
        if os.path.basename(path).startswith(SELF_TEST):
            selftest.clean(path)
        if os.path.basename(path).startswith(REMOVING) and self._is_used(path):
            # Set aside, and found to be used, by an installer that was killed before it said so.
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
        """Remove a tree, unless it is used; whether it is gone."""
        path = self.layout.path(name)
        if not os.path.lexists(path):
            return True
        if self._is_used(path):
            return False
        # Nobody finds it from here on; who found it a moment ago executes it by now.
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
        """Give new files the labels that SELinux' policy has for their paths, if it is on.

        Where there is no program for that, systems have one label for all of such a place.
        """
        if not os.path.exists(os.path.join(self.selinux, "enforce")):
            return
        action = f"the SELinux labels of {path}"
        program = shutil.which("restorecon", path=self.path)
        if program is None:
            outcome.warnings.append(f"SELinux is on, and there is no restorecon for {path}")
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
    """Be the only installer below a prefix.

    Args:
        prefix: the directory.
        make: whether to make it if it is not there; else nothing is locked then.

    Raises:
        InstallerBusy: another one works there.
        StepFailed: it cannot be made.
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
    umask = os.umask(_UMASK)  # what is installed is for everybody to look at
    try:
        yield
    except BaseException:
        if made:
            with suppress(OSError):  # something is in it
                os.rmdir(prefix)
        raise
    finally:
        os.umask(umask)
        if fd >= 0:
            os.close(fd)


def _lock(prefix: str, *, make: bool) -> int:
    """The locked directory; -1 if it is not there, and is not to be made."""
    deadline = time.monotonic() + _LOCK
    while True:
        if make:
            _make_directory(prefix)
        try:
            fd = os.open(prefix, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            if make:
                continue  # it was removed in this moment
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
                    found="another installer does",
                    do="wait until it has ended",
                ) from error
            time.sleep(_POLL)
        os.close(fd)


def is_locked(prefix: str) -> bool:
    """Whether an installer works below a prefix now."""
    try:
        fd = os.open(prefix, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # Shared: who only looks is in nobody's way but for this moment.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def end_fork_servers(trees: Sequence[str], *, proc: str = usage.PROC) -> None:
    """Tell the fork servers of trees to end, and wait a moment for them.

    Their spares end with them and are not told: one may be a verb that containerd waits for, and
    then a shim. Who does not end keeps its tree, and nothing else.
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
    """Tell a fork server to end; its pidfd, or -1 if it is none, or gone."""
    if user.role is not Role.FORK_SERVER:
        return -1
    try:
        fd = os.pidfd_open(user.pid)
    except ProcessLookupError:
        return -1
    # The number may have been given to another process since it was looked at.
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
            return  # somebody has put something else there since
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
