"""Find the program of the running engine; a node may have several.

The configuration should be checked by the containerd that will read it. If one is running, its
program is found from the process that listens on the socket or, if that process is not visible,
from the version that it reports.

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
    """Return the program of the engine that listens on a socket.

    Returns:
        The program's path; None if nothing listens there, or if it cannot be determined.

    Raises:
        EngineElsewhere: no program on this node has the engine's version.
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
        f"to find the program of the {name} that listens on {address}",
        found=f"it has version {version}; "
        + (", ".join(f"{path} is {each}" for path, each in others.items()) or "none is installed"),
        do="name it with --containerd, or pass the right engine's socket with --socket",
    )


def _executed_by(pid: int, name: str) -> str | None:
    """Return a process's program, if it has this name and could be started again."""
    if pid <= 1:
        return None
    program = Procfs().program(pid).removesuffix(DELETED)
    return program if os.path.basename(program) == name and os.access(program, os.X_OK) else None


def _reported_version(address: str) -> str:
    """Return the version that an engine reports; "" if it is not a CRI containerd."""
    from api.proto import cri_pb2 as pb  # noqa: PLC0415 - gRPC, only where a query is needed
    from integration.cri.client import Cri  # noqa: PLC0415
    from integration.cri.errors import CriError  # noqa: PLC0415

    try:
        with Cri(address) as cri:
            answer = cri.version(pb.VersionRequest(), timeout=_TIMEOUT)
    except CriError:
        return ""
    return answer.runtime_version if answer.runtime_name == "containerd" else ""
