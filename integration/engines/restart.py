"""Restart or reload an engine after its configuration changed, if the user asked for that.

Rules
- Do only what was requested, and nothing if the engine does not need it.
- **Docker** reloads on SIGHUP, if a reload is enough. systemd may own its socket, so we send a
  request to learn the pid of dockerd, which answers it. dockerd announces the end of the reload as
  an event; containers started before the event still use the old configuration.
- **containerd** cannot reload: SIGHUP stops it. This amounts to a restart only if something starts
  it again. systemd considers an exit by SIGHUP clean, so only a unit with ``Restart=always`` comes
  back. We check that first.
- **CRI-O** is restarted only through systemd.
- After a restart we wait until the engine answers on its socket.

Source: containerd cmd/containerd/command/main_unix.go (handledSignals); systemd.service(5)
Restart=; unix(7) SO_PEERCRED, SO_PASSCRED; Docker Engine API, SystemEvents.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import time
import urllib.parse
from enum import StrEnum
from typing import Final

from api.ttrpc.sockets import peer_credentials
from integration.containers.procfs import Procfs
from integration.engines.errors import EngineNotInstalled, RestartFailed, RestartRefused
from integration.engines.files import Change, Need
from integration.engines.programs import find_program, run
from integration.timeouts import PATIENCE

_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid
_TIMEOUT: Final = 60 * PATIENCE
_POLL: Final = 0.05
_RELOADS: Final = urllib.parse.quote('{"type":["daemon"],"event":["reload"]}')

SOCKETS: Final = {
    "containerd": "/run/containerd/containerd.sock",
    "docker": "/run/docker.sock",
    "crio": "/run/crio/crio.sock",
}
"""The default socket of each engine."""

UNITS: Final = {"containerd": "containerd", "docker": "docker", "crio": "crio"}
"""The systemd unit of each engine."""


class Mode(StrEnum):
    """How to make an engine read its configuration."""

    NONE = "none"
    SIGNAL = "signal"
    SYSTEMD = "systemd"


def restart(
    change: Change, mode: Mode, *, address: str, unit: str, systemctl: str = "systemctl"
) -> Mode:
    """Make an engine read a change that has been applied.

    Returns:
        What was done: ``Mode.NONE`` if nothing was necessary.

    Raises:
        RestartRefused: the engine would not come back, or it does not support this mode.
        RestartFailed: the engine does not answer.
    """
    if mode is Mode.NONE or change.need is Need.NOTHING:
        return Mode.NONE
    if mode is Mode.SYSTEMD:
        _restart_by_systemd(unit, systemctl)
        _wait(address, change.engine, previous=None)
        return mode
    if change.engine == "docker":
        if change.need is Need.RESTART:
            raise RestartRefused(
                "to restart Docker with a signal",
                found=f"the signal only reloads, and {change.why}",
                do="use --restart systemd, or restart it yourself",
            )  # fmt: skip
        _reload_docker(address)
        return mode
    if change.engine != "containerd":
        raise RestartRefused(
            f"to restart {change.engine} with a signal", found="it has no signal for that",
            do="use --restart systemd",
        )  # fmt: skip
    pid = _pid_listening(address, change.engine)
    _check_supervised(pid, systemctl)
    os.kill(pid, signal.SIGHUP)
    _wait(address, change.engine, previous=pid)
    return mode


def _reload_docker(address: str) -> None:
    """Make dockerd read its configuration, and wait until it has."""
    # dockerd subscribes only after it has answered; ``since`` also returns the events in between.
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    request = f"GET /events?since={seconds}.{nanoseconds:09d}&filters={_RELOADS} HTTP/1.0"
    with _connect(address, "docker") as client:
        output = b""
        deadline = time.monotonic() + _TIMEOUT
        try:
            client.sendall(f"{request}\r\nHost: docker\r\n\r\n".encode())
            os.kill(_pid_answering(address), signal.SIGHUP)
            while b'"reload"' not in output:
                client.settimeout(max(deadline - time.monotonic(), 0.001))
                if not (more := client.recv(65536)):
                    raise ConnectionAbortedError("it closed the connection")
                output += more
        except OSError as error:
            raise RestartFailed(
                f"to reload the configuration of Docker on {address}",
                found=f"it does not report that it has reloaded ({error})", do="see dockerd's log",
            ) from error  # fmt: skip


def _restart_by_systemd(unit: str, systemctl: str) -> None:
    try:
        done = run([find_program(systemctl, "PATH"), "restart", unit], timeout=_TIMEOUT)
    except EngineNotInstalled as error:
        raise RestartRefused(
            f"a restart of {unit} by systemd", found=error.found, do="restart it yourself"
        ) from error
    if done.returncode:
        output = (done.stderr or done.stdout).strip()
        raise RestartFailed(
            f"a restart of {unit} by systemd", found=output or f"exit code {done.returncode}",
            do=f"see `systemctl status {unit}`",
        )  # fmt: skip


def _check_supervised(pid: int, systemctl: str) -> None:
    """Check that systemd starts containerd again after it exits."""
    asked = f"to restart containerd ({pid}) by SIGHUP, which stops it"
    do = "use --restart systemd, or restart it yourself"
    unit = _unit_of(pid)
    if unit is None:
        raise RestartRefused(asked, found="no systemd service: nothing would start it again", do=do)
    try:
        shown = run([find_program(systemctl, "PATH"), "show", "--property=Restart,MainPID", unit])
    except EngineNotInstalled as error:
        raise RestartRefused(asked, found=error.found, do=do) from error
    properties = dict(line.partition("=")[::2] for line in shown.stdout.splitlines())
    if properties.get("MainPID") != str(pid) or properties.get("Restart") != "always":
        raise RestartRefused(
            asked,
            found=f"{unit} has Restart={properties.get('Restart', '')}, "
            f"MainPID={properties.get('MainPID', '')}: systemd would not start it again",
            do=do,
        )


def _unit_of(pid: int) -> str | None:
    """Return the systemd service of a process."""
    found = re.search(r"/([^/\n]+\.service)$", Procfs().cgroup(pid), re.MULTILINE)
    return None if found is None else found[1]


def _pid_listening(address: str, engine: str) -> int:
    """Return the process that listens on a socket."""
    with _connect(address, engine) as client:
        return _checked_pid(peer_credentials(client).pid, address)


def _pid_answering(address: str) -> int:
    """Return the process that answers HTTP on a socket, which may not be the one that listens."""
    with _connect(address, "docker") as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        client.settimeout(_TIMEOUT)
        try:
            client.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            _, control, _, _ = client.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
        except OSError as error:
            raise RestartFailed(f"an answer on {address}", found=str(error)) from error
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            return _checked_pid(_CREDENTIALS.unpack(data[: _CREDENTIALS.size])[0], address)
    raise RestartFailed(f"the process behind {address}", found="cannot be identified")


def _checked_pid(pid: int, address: str) -> int:
    if pid <= 1:
        raise RestartRefused(
            f"the process behind {address}",
            found="is in another PID namespace" if pid == 0 else "is the init system",
            do="run this in the host's PID namespace, or use --restart systemd",
        )
    return pid


def _connect(address: str, engine: str) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    try:
        client.settimeout(_TIMEOUT)
        client.connect(address)
    except OSError as error:
        client.close()
        raise RestartFailed(
            f"{engine} on {address}", found=error.strerror or str(error),
            do="start it: it then reads the new configuration",
        ) from error  # fmt: skip
    return client


def _wait(address: str, engine: str, *, previous: int | None) -> None:
    """Wait until the engine answers.

    Args:
        address: the path of its socket.
        engine: its name.
        previous: the process that was signalled and must exit; None if the caller has waited for
            it.
    """
    deadline = time.monotonic() + _TIMEOUT
    while True:
        found = f"process {previous} is still running"
        try:
            if previous is None:
                _connect(address, engine).close()
                return
            if _pid_listening(address, engine) != previous:
                return
        except (RestartFailed, RestartRefused) as error:
            found = error.found
        if time.monotonic() > deadline:
            raise RestartFailed(
                f"{engine} on {address} after its restart",
                found=f"no answer within {_TIMEOUT:g} s: {found}",
                do=f"see `systemctl status {UNITS.get(engine, engine)}`",
            )
        time.sleep(_POLL)
