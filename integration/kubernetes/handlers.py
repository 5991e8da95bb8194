"""What the engine was started with, and not what its files say (:mod:`integration.cri.engine`).

gRPC is imported in a child that ends with the answer: it starts threads, and the installer stays.
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
_AT_ONCE: Final = 1 << 16
_ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def ask_engine(socket: str) -> Engine | None:
    """Ask an engine what it was started with.

    Returns:
        None if it serves none.

    Raises:
        ConnectionError: it does not answer, or not yet: it has only just been started.
    """
    reader, writer = os.pipe()
    child = 0
    # The child ends by a signal that comes before it has put our handlers aside.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
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
    told = json.loads(answer)
    return None if told is None else Engine(**{**told, "handlers": tuple(told["handlers"])})


def _answer(socket: str, writer: int, mask: Iterable[int]) -> NoReturn:
    """Be the child. It has no handlers, and this mask."""
    try:
        for number in _ENDING:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        with contextlib.suppress(ConnectionError):
            engine = _ask(socket)
            with open(writer, "wb") as file:
                file.write(json.dumps(engine and asdict(engine)).encode())
    finally:
        os._exit(0)


def _read(reader: int) -> bytes:
    """All that is written; nothing if that takes too long."""
    deadline = time.monotonic() + _TIMEOUT
    answer = b""
    while select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
        more = os.read(reader, _AT_ONCE)
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
        # containerd's CRI refuses everything until it has started.
        raise ConnectionError(socket) from error
    except CriError as error:
        raise ConnectionError(socket) from error
    return engine_of(version, status)
