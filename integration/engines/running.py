"""Which program the engine is that runs: a node may have several, and only one is told of us.

A configuration is checked by the containerd that is going to read it. Where one runs, that is the
one: its program is known by the process that listens on its socket, if that can be seen from here,
and else by the version that it says it is of.

Source: unix(7) SO_PEERCRED; CRI v1 Version.
"""

from __future__ import annotations

import os
import socket
from typing import Final

from api.ttrpc.sockets import peer_credentials
from integration.containers.procfs import DELETED, Procfs
from integration.engines.errors import EngineElsewhere, EngineNotInstalled
from integration.engines.programs import programs_named, version_of

_TIMEOUT: Final = 5.0


def running_program(address: str, name: str) -> str | None:
    """The program of the engine that listens on a socket.

    Returns:
        Its path; None if nobody listens there, or who it is cannot be known.

    Raises:
        EngineElsewhere: it is none that could be found.
    """
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(_TIMEOUT)
            client.connect(address)
            program = _executed_by(peer_credentials(client).pid, name)
    except OSError:
        return None
    if program is not None:
        return program
    version = _reported_version(address)
    if not version:
        return None
    others = {}
    for program in programs_named(name):
        try:
            others[program] = version_of(program)
        except EngineNotInstalled:
            continue
        if others[program] == version:
            return program
    raise EngineElsewhere(
        f"the program of the {name} that listens on {address}",
        found=f"it is of version {version}; "
        + (", ".join(f"{path} is {each}" for path, each in others.items()) or "none is installed"),
        do="name it with --containerd, or --socket if another engine is meant",
    )


def _executed_by(pid: int, name: str) -> str | None:
    """What a process executes, if that is a program of this name that could be started again."""
    if pid <= 1:
        return None
    program = Procfs().program(pid).removesuffix(DELETED)
    return program if os.path.basename(program) == name and os.access(program, os.X_OK) else None


def _reported_version(address: str) -> str:
    """The version that an engine says it is of; "" if it serves no kubelet."""
    from api.proto import cri_pb2 as pb  # noqa: PLC0415 - gRPC, for who has to ask
    from integration.cri.client import Cri  # noqa: PLC0415
    from integration.cri.errors import CriError  # noqa: PLC0415

    try:
        with Cri(address) as cri:
            answer = cri.version(pb.VersionRequest(), timeout=_TIMEOUT)
    except CriError:
        return ""
    return answer.runtime_version if answer.runtime_name == "containerd" else ""
