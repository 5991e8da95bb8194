"""Restarting engines: which processes are signalled or refused, and never without a request."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.engines import restart as restarts
from integration.engines.errors import RestartFailed, RestartRefused
from integration.engines.files import Change, Need
from integration.engines.restart import Mode, restart

SERVER = """
import os, signal, socket, sys, time
listener = socket.socket(socket.AF_UNIX)
path = sys.argv[1]
if os.path.exists(path): os.unlink(path)
listener.bind(path); listener.listen(8)
watchers, event = [], b'{"status":"reload","Type":"daemon","Action":"reload"}\\n'
def reload(*_):
    open(path + ".hup", "w").close()
    for each in watchers:
        if not os.path.exists(path + ".bad"): each.send(event)
        each.close()
signal.signal(signal.SIGHUP, reload)
print("ready", flush=True)
while True:
    client, _ = listener.accept()
    client.settimeout(60)
    try:
        asked = client.recv(999)
        if asked.startswith(b"GET /"): client.send(b"HTTP/1.0 200 OK\\r\\n\\r\\n")
        if asked.startswith(b"GET /events?since="): watchers.append(client)
        else: client.close()
    except OSError: pass
"""


def change(engine: str, need: Need = Need.RESTART) -> Change:
    return Change(engine, (), need, "", "")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-c", SERVER, f"{tmp_path}/s"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


def systemctl(tmp_path: Path, script: str) -> str:
    path = tmp_path / "systemctl"
    path.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\n{script}\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("engine", ["containerd", "docker", "crio"])
def test_nothing_happens_that_is_not_asked_for_or_not_needed(engine: str, tmp_path: Path) -> None:
    program = systemctl(tmp_path, "exit 1")
    nowhere = {"address": f"{tmp_path}/none", "unit": "x", "systemctl": program}
    assert restart(change(engine), Mode.NONE, **nowhere) is Mode.NONE
    unneeded = change(engine, Need.NOTHING)
    assert restart(unneeded, Mode.SYSTEMD, **nowhere) is Mode.NONE
    assert restart(unneeded, Mode.SIGNAL, **nowhere) is Mode.NONE
    assert not (tmp_path / "asked").exists()


def test_docker_is_told_by_sighup_whoever_made_its_socket(
    daemon: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    done = restart(
        change("docker", Need.RELOAD), Mode.SIGNAL, address=f"{tmp_path}/s", unit="docker"
    )
    assert done is Mode.SIGNAL
    assert os.path.exists(f"{tmp_path}/s.hup"), "the daemon on the socket reloaded"
    assert daemon.poll() is None
    with pytest.raises(RestartRefused, match="reload"):
        restart(change("docker"), Mode.SIGNAL, address=f"{tmp_path}/s", unit="docker")


@pytest.mark.usefixtures("daemon")
def test_docker_that_has_not_reloaded_is_not_said_to_have(tmp_path: Path) -> None:
    (tmp_path / "s.bad").touch()
    with pytest.raises(RestartFailed, match="does not report that it has"):
        restart(change("docker", Need.RELOAD), Mode.SIGNAL, address=f"{tmp_path}/s", unit="docker")
    assert (tmp_path / "s.hup").exists()


def test_systemd_restarts_and_the_engine_is_waited_for(
    daemon: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    program = systemctl(tmp_path, "")
    done = restart(
        change("crio"), Mode.SYSTEMD, address=f"{tmp_path}/s", unit="my-crio", systemctl=program
    )
    assert done is Mode.SYSTEMD
    assert (tmp_path / "asked").read_text() == "restart my-crio\n"
    refuses = systemctl(tmp_path, "echo 'Unit not found.' >&2; exit 5")
    with pytest.raises(RestartFailed, match="Unit not found"):
        restart(change("crio"), Mode.SYSTEMD, address=f"{tmp_path}/s", unit="x", systemctl=refuses)


def test_containerd_gets_sighup_only_where_systemd_starts_it_again(
    daemon: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *args: told.append(args))
    monkeypatch.setattr(restarts, "_wait", lambda *args, **named: None)
    shown = f"echo MainPID={daemon.pid}; echo Restart=%s"

    def signal_containerd(policy: str) -> Mode:
        program = systemctl(tmp_path, shown % policy)
        return restart(
            change("containerd"), Mode.SIGNAL, address=f"{tmp_path}/s", unit="c", systemctl=program
        )

    # Not in a systemd unit, as here.
    monkeypatch.setattr(restarts, "_unit_of", lambda pid: None)
    with pytest.raises(RestartRefused, match="nothing would start it again"):
        signal_containerd("always")
    monkeypatch.setattr(restarts, "_unit_of", lambda pid: "containerd.service")
    with pytest.raises(RestartRefused, match="Restart=on-failure"):
        signal_containerd("on-failure")
    assert told == []
    assert signal_containerd("always") is Mode.SIGNAL
    assert told == [(daemon.pid, signal.SIGHUP)]
    assert (tmp_path / "asked").read_text().splitlines()[-1] == (
        "show --property=Restart,MainPID containerd.service"
    )


def test_crio_knows_no_signal_and_nobody_is_there_to_ask(tmp_path: Path) -> None:
    with pytest.raises(RestartRefused, match="systemd"):
        restart(change("crio"), Mode.SIGNAL, address=f"{tmp_path}/none", unit="x")
    for engine in ("docker", "containerd"):
        with pytest.raises(RestartFailed, match="Start it"):
            restart(change(engine, Need.RELOAD), Mode.SIGNAL, address=f"{tmp_path}/none", unit="x")
