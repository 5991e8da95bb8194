"""Ask the engine which settings it runs with, which may differ from its configuration files.

gRPC starts threads and uses memory, and the installer runs for a long time. So a child process
imports gRPC, and exits after the answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Final, NoReturn

from api.errors import Status
from integration.cri.engine import Engine, engine_of

_TIMEOUT: Final = 10.0
_CHUNK: Final = 1 << 16
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def query_engine(socket: str) -> Engine | None:
    """Ask an engine which settings it runs with.

    Returns:
        None if the socket does not serve the CRI.

    Raises:
        ConnectionError: the engine does not answer, perhaps because it is still starting.
    """
    reader, writer = os.pipe()
    child = 0
    # Block signals until the child has reset our handlers, so a signal still terminates it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        child = os.fork()
        if child == 0:
            _answer(socket, writer, before)
        os.close(writer)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        answer = _read(reader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(reader)
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if not answer:
        raise ConnectionError(socket)
    fields = json.loads(answer)
    return None if fields is None else Engine(**{**fields, "handlers": tuple(fields["handlers"])})


def _answer(socket: str, writer: int, mask: Iterable[int]) -> NoReturn:
    """Run in the child: reset the handlers and the mask, query, write the answer, exit."""
    try:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        with contextlib.suppress(ConnectionError):
            engine = _ask(socket)
            with open(writer, "wb") as file:
                file.write(json.dumps(engine and asdict(engine)).encode())
    finally:
        os._exit(0)


def _read(reader: int) -> bytes:
    """Read everything the child writes; return nothing on a timeout."""
    deadline = time.monotonic() + _TIMEOUT
    answer = b""
    while select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
        more = os.read(reader, _CHUNK)
        if not more:
            return answer
        answer += more
    return b""


def _ask(socket: str) -> Engine | None:
    from api.proto import cri_pb2 as pb  # noqa: PLC0415 - in the child alone
    from integration.cri.client import Cri  # noqa: PLC0415
    from integration.cri.errors import CriError, CriRefused  # noqa: PLC0415

    try:
        with Cri(socket) as cri:
            version = cri.version(pb.VersionRequest(), timeout=_TIMEOUT / 3)
            status = cri.status(pb.StatusRequest(verbose=True), timeout=_TIMEOUT / 3)
    except CriRefused as error:
        if error.status == Status.UNIMPLEMENTED:
            return None
        # containerd's CRI refuses all calls while it is starting.
        raise ConnectionError(socket) from error
    except CriError as error:
        raise ConnectionError(socket) from error
    return engine_of(version, status)
