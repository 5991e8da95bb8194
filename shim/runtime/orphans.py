"""End the orphans of a dead shim: containers, runtime calls, loggers.

First, the low-level runtime is called, which knows best what it created. But it may be missing,
hang, or fail, and containerd waits only five seconds in total. Then this module itself kills the
processes, and removes the cgroups and the runtime's state.

A pid alone never suffices to kill a process. It must have the start time that the runtime recorded,
or be in a cgroup of the container. A pidfd holds the process during the check, so that the pid
cannot be reused.

Source: runc libcontainer State (state.json); crun libcrun_container_status_t (status);
cgroups(7); kernel Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/freezer-subsystem.rst.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Sequence
from typing import Any, Final

from shim import bundle, files, programs
from shim.cgroup import cgroup
from shim.errors import BundleUnusable
from shim.files import at_and_below
from shim.mountinfo import leads_below, served_mount_points
from shim.processes import hold, hold_descendants, may_be_alive, send_kill, start_time_of
from shim.programs import has_ended, run

# Seconds. The runtime usually needs 0.02, and containerd allows 5 for the whole verb.
CALLS_TIMEOUT: Final = 1.0
RUNTIME_TIMEOUT: Final = 2.5
KILL_TIMEOUT: Final = 1.0
LOGGER_TIMEOUT: Final = 0.3
_REAP_TIMEOUT: Final = 0.2
_POLL: Final = 0.01

_CGROUPS: Final = "/sys/fs/cgroup"
_LONGEST_STATE: Final = 4 << 20


class Recorded:
    """A runtime's record of a container.

    Attributes:
        pid: its init process; 0 if unknown.
        start_time: when init started, in clock ticks since boot; 0 if unknown.
        cgroups: the directories of its cgroup, one for each hierarchy.
    """

    __slots__ = ("cgroups", "pid", "start_time")

    def __init__(self, pid: int = 0, start_time: int = 0, cgroups: Sequence[str] = ()) -> None:
        self.pid = pid
        self.start_time = start_time
        self.cgroups = tuple(cgroups)


def end_calls(bundle_path: str, logs: Sequence[str]) -> list[str]:
    """Wait for a dead shim's runtime calls, and kill those that do not end.

    After such a call, its results are in the usual places; before, they are half created and
    hidden. So everything that a killed call has started is killed with it: CRIU, and the part of a
    container that CRIU has restored.

    Args:
        bundle_path: the bundle, which contains the logs of the calls.
        logs: these logs' names.

    Returns:
        What failed, one line each.
    """
    problems = []
    deadline = time.monotonic() + CALLS_TIMEOUT
    for pid in _calls_that_log(bundle_path, logs):
        held = hold(pid)
        if held is None:
            continue
        try:
            if not _logs_to(pid, bundle_path, logs):
                continue  # it ended, and its number is another's
            if not has_ended(held, max(0.0, deadline - time.monotonic())):
                problems.append(f"process {pid} of a runtime lasted too long, and was killed")
                problems += _end_family(pid, held, os.path.basename(bundle_path))
        finally:
            os.close(held)
    for name in logs:
        files.remove(os.path.join(bundle_path, name))
    return problems


def end_loggers(loggers: Sequence[tuple[int, int]]) -> list[str]:
    """End the loggers of a container that has ended.

    Args:
        loggers: the pid and start time of each.

    Returns:
        What failed, one line each.
    """
    problems = []
    for pid, start_time in loggers:
        held = hold(pid)
        if held is None:
            continue
        try:
            if start_time_of(pid) != start_time:
                continue  # it ended, and its number is another's
            # It ends by itself at the end of its input, or on a signal.
            if has_ended(held, LOGGER_TIMEOUT):
                continue
            signal.pidfd_send_signal(held, signal.SIGTERM)
            if not has_ended(held, LOGGER_TIMEOUT):
                send_kill(held)
                problems.append(f"process {pid}, a logger, did not end, and was killed")
        except ProcessLookupError:
            continue
        finally:
            os.close(held)
    return problems


def end_container(
    record: bundle.RuntimeRecord,
    container_id: str,
    pid: int,
    *,
    cgroup_path: str = "",
    ask_runtime: bool = True,
) -> list[str]:
    """End a container, and remove its cgroup and the runtime's state.

    Args:
        record: its runtime's options.
        container_id: its id, safe as a name.
        pid: its init process from the bundle; 0 if unknown.
        cgroup_path: its cgroup from its OCI spec; "" if unknown. A killed runtime may have created
            it before recording anything.
        ask_runtime: whether there is enough time to call the runtime.

    Returns:
        What failed, one line each. The container is still gone unless the last line says otherwise.
    """
    state_directory = os.path.join(record.root, container_id)
    recorded = Recorded()
    problems: list[str] = []
    if os.path.isdir(state_directory):
        # Read this before the runtime removes it, in case it dies half way.
        recorded = read_state(state_directory, problems)
        said = run_delete(record, container_id) if ask_runtime else "no time is left for it"
        if said:
            problems.append(f"{record.binary} delete {container_id}: {said}")
        ended = not said and not os.path.lexists(state_directory)
    else:
        ended = not may_be_alive(pid)
    named = _named(cgroup_path, container_id)
    if ended and not named:
        return problems
    recorded.cgroups = (*recorded.cgroups, *(d for d in named if d not in recorded.cgroups))
    problems += end_by_force(container_id, recorded.pid or pid, recorded)
    try:
        files.remove_tree(state_directory)
    except OSError as error:
        problems.append(f"{state_directory}: {os.strerror(error.errno or 0).lower()}")
    return problems


def end_process(pid: int, start_time: int) -> None:
    """Kill a process if it is the right one.

    Args:
        pid: the process; 0 if there is none.
        start_time: when the right process started, in clock ticks since boot.
    """
    held = hold(pid)
    if held is None:
        return
    try:
        if start_time_of(pid) == start_time:
            send_kill(held)
    finally:
        os.close(held)


def run_delete(record: bundle.RuntimeRecord, container_id: str) -> str:
    """Make the runtime delete a container by force.

    Args:
        record: the runtime's options.
        container_id: the container.

    Returns:
        The error in one line; "" for none.
    """
    program = programs.find(record.binary)
    if program is None:
        return f"no such program in {programs.search_path()}"
    words = [record.binary, "--root", record.root]
    if record.systemd_cgroup:
        words.append("--systemd-cgroup")
    try:
        ended = run(program, [*words, "delete", "--force", container_id], timeout=RUNTIME_TIMEOUT)
    except OSError as error:
        return os.strerror(error.errno or 0).lower()
    if ended.status is None:
        return f"had not ended after {RUNTIME_TIMEOUT} s, and was killed"
    if ended.status == 0:
        return ""
    said = (ended.stdout + ended.stderr).decode(errors="replace")
    return f"exit status {ended.status}: {' '.join(said.split()) or 'no word why'}"


def end_by_force(container_id: str, pid: int, recorded: Recorded) -> list[str]:
    """Kill a container's processes and remove its cgroups, without its runtime.

    Args:
        container_id: the container.
        pid: the container's init process; 0 if unknown.
        recorded: what the runtime has recorded.

    Returns:
        What is left, one line each.
    """
    deadline = time.monotonic() + KILL_TIMEOUT
    problems = []
    init = hold(pid)
    try:
        cgroups = [d for d in recorded.cgroups if _is_apart(d)]
        if init is not None:
            if _is_init_of(container_id, pid, recorded):
                cgroups += [d for d in _cgroups_of(pid) if d not in cgroups and _is_apart(d)]
                send_kill(init)
            else:
                problems.append(
                    f"process {pid} no longer belongs to {container_id}; it was left alone"
                )
                os.close(init)
                init = None
        while not _all_ended(cgroups, init) and time.monotonic() < deadline:
            for directory in cgroups:
                _kill_all_in(directory)
            time.sleep(_POLL)
        if not _all_ended(cgroups, init):
            problems.append(f"{container_id} still has processes {KILL_TIMEOUT} s after SIGKILL")
    finally:
        if init is not None:
            os.close(init)
    for directory in cgroups:
        left = _remove_cgroup(directory, deadline)
        if left:
            problems.append(left)
    return problems


def has_cgroup(path: str, container_id: str) -> bool:
    """Whether a container's cgroup exists.

    Args:
        path: the cgroup from the OCI spec. It must be named after the container, which systemd's
            are not.
        container_id: the container.
    """
    return bool(_named(path, container_id))


def read_state(directory: str, problems: list[str]) -> Recorded:
    """Read what a runtime has recorded about a container.

    Args:
        directory: the runtime's state directory for this container.
        problems: gets an entry for a file that cannot be parsed.

    Returns:
        The record; empty if the runtime had not got that far.
    """
    for name, read in (("state.json", _from_runc), ("status", _from_crun)):
        path = os.path.join(directory, name)
        if not os.path.lexists(path):
            continue
        try:
            return read(files.parse_object(files.read(path, _LONGEST_STATE), path))
        except BundleUnusable as error:
            problems.append(str(error))
    return Recorded()


def _calls_that_log(bundle_path: str, logs: Sequence[str]) -> list[int]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if _may_be_ours(pid) and _logs_to(pid, bundle_path, logs)]


def _may_be_ours(pid: int) -> bool:
    """Whether a process runs as our user, in our pid and user namespaces.

    A process in a container can have any command line, and make reading it hang.
    """
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
            return False
        kinds = ("pid", "user")
        return all(
            os.readlink(f"/proc/{pid}/ns/{kind}") == os.readlink(f"/proc/self/ns/{kind}")
            for kind in kinds
        )
    except OSError:
        return False  # it has ended


def _logs_to(pid: int, bundle_path: str, logs: Sequence[str]) -> bool:
    """Whether a process' arguments name one of these logs, in any spelling of its directory."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = [os.fsdecode(word) for word in file.read().split(b"\0")]
        paths = [w for w in words if w.startswith("/") and os.path.basename(w) in logs]
        served = served_mount_points() if paths else ()
        folders = (os.path.dirname(p) for p in paths if not leads_below(p, served, set()))
        return any(os.path.samefile(folder, bundle_path) for folder in folders)
    except OSError:
        return False  # it has ended, or its directory is gone


def _end_family(pid: int, held: int, container_id: str) -> list[str]:
    """Kill the process of a pidfd, and all that it has started; return what is left.

    This removes a cgroup that was created for it and is named after the container.
    """
    deadline = time.monotonic() + 2 * _REAP_TIMEOUT
    family = hold_descendants(pid)
    cgroups = {
        directory
        for child in family
        for directory in _cgroups_of(child)
        if _is_named_after(directory, container_id) and _is_apart(directory)
    }
    try:
        ours = [held, *family.values()]
        for fd in ours:
            send_kill(fd)
        for fd in ours:
            has_ended(fd, max(0.0, min(_REAP_TIMEOUT, deadline - time.monotonic())))
    finally:
        for fd in family.values():
            os.close(fd)
    return [left for directory in cgroups if (left := _remove_cgroup(directory, deadline))]


def _from_runc(state: dict[str, Any]) -> Recorded:
    paths = state.get("cgroup_paths")
    return Recorded(
        _integer(state.get("init_process_pid")),
        _integer(state.get("init_process_start")),
        [p for p in paths.values() if _is_path(p)] if isinstance(paths, dict) else (),
    )


def _from_crun(state: dict[str, Any]) -> Recorded:
    path = state.get("cgroup-path")
    directories = _below_each_hierarchy(path) if isinstance(path, str) else []
    return Recorded(
        _integer(state.get("pid")), _integer(state.get("process-start-time")), directories
    )


def _integer(value: object) -> int:
    return value if type(value) is int and value > 0 else 0  # a bool is an int as well


def _is_path(value: object) -> bool:
    """Whether a value is a path that the kernel can be asked for."""
    try:
        return isinstance(value, str) and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def _below_each_hierarchy(path: str) -> list[str]:
    """Return the path of a cgroup from a spec or crun; "" if unknown."""
    try:
        return cgroup.named(path)
    except OSError:
        return []


def _named(path: str, container_id: str) -> list[str]:
    """Return the directories of a spec's cgroup, if it exists and is named after the container."""
    directories = _below_each_hierarchy(path) if path else []
    return [d for d in directories if _is_named_after(d, container_id) and os.path.isdir(d)]


def _cgroups_of(pid: int) -> list[str]:
    """Return the directories of the cgroups that a process does not share with us."""
    try:
        found = cgroup.of(pid)
    except OSError:
        return []
    return [*dict.fromkeys(found.directories.values())] if found else []


def _is_init_of(container_id: str, pid: int, recorded: Recorded) -> bool:
    if recorded.pid == pid and recorded.start_time:
        return start_time_of(pid) == recorded.start_time
    # Without a record: runc and containerd name the cgroup after the container; systemd's scopes
    # add a prefix.
    return any(_is_named_after(directory, container_id) for directory in _cgroups_of(pid))


def _is_named_after(directory: str, container_id: str) -> bool:
    """Whether runc, containerd or systemd would name a container's cgroup like this."""
    name = os.path.basename(directory)
    return name == container_id or name.endswith(f"-{container_id}.scope")


def _is_apart(directory: str) -> bool:
    """Whether a cgroup may be killed, because it contains neither us nor containerd."""
    if not os.path.realpath(directory).startswith(f"{_CGROUPS}/"):
        return False
    return not {os.getpid(), os.getppid()}.intersection(cgroup.pids_in(directory))


def _kill_all_in(directory: str) -> None:
    # Processes frozen by version 1's freezer do not die before a thaw.
    for name, content in (("freezer.state", b"THAWED"), ("cgroup.kill", b"1")):
        try:
            with open(os.path.join(directory, name), "r+b", buffering=0) as file:
                file.write(content)
        except OSError:
            continue  # this cgroup version or hierarchy lacks the file
    for pid in cgroup.pids_in(directory):
        held = hold(pid)
        if held is None:
            continue
        try:
            if pid in cgroup.pids_in(directory):  # still there, so the pidfd is that process
                send_kill(held)
        finally:
            os.close(held)


def _all_ended(cgroups: Sequence[str], init: int | None) -> bool:
    if any(cgroup.pids_in(directory) for directory in cgroups):
        return False
    return init is None or has_ended(init, 0)


def _remove_cgroup(directory: str, deadline: float) -> str:
    """Remove a cgroup and those below it; returns what is left."""
    while True:
        try:
            for folder in reversed([*at_and_below(directory)]):
                os.rmdir(folder)
        except FileNotFoundError:
            return ""
        except OSError as error:
            # The last process has died, but is still in the cgroup.
            if error.errno == errno.EBUSY and time.monotonic() < deadline:
                time.sleep(_POLL)
                continue
            return f"{directory}: {os.strerror(error.errno or 0).lower()}"
        return ""
