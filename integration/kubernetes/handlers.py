"""Which handlers the engine has: what it was started with, and not what its files say.

An engine reads its configuration when it starts. Whether it still has to be restarted is known to
it alone, and it tells: the CRI's Status, with more words, has its configuration in it.

gRPC is imported in a child that ends with the answer: it starts threads, and the installer stays.

Source: CRI v1 Status (verbose), containerd internal/cri/server/status.go; CRI-O server/status.go.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
from typing import Any, Final

from api.errors import Status

__all__ = ["has_handler", "knows"]

# Of containerd 1.x and 2.x; what CRI-O serves has no such words, and 2.x has a list besides.
_TIMEOUT: Final = 10.0
_LONGEST: Final = 1 << 20


def knows(info: dict[str, Any], handlers: list[str], name: str, kind: str) -> bool | None:
    """Whether an engine has a handler, by what it tells.

    Args:
        info: the words of its Status, each a JSON document by its name.
        handlers: the list of its Status; empty if it is too old to have one.
        name: the handler's.
        kind: the type that it has to have.

    Returns:
        None if it cannot be known.
    """
    runtimes = None
    try:
        config = json.loads(info.get("config", "null"))
        runtimes = config["containerd"]["runtimes"]
    except (ValueError, KeyError, TypeError):
        pass
    if isinstance(runtimes, dict):
        runtime = runtimes.get(name)
        if not isinstance(runtime, dict):
            return False
        # Another tool's handler of that name has another type.
        return bool(runtime.get("runtimeType", kind) == kind)
    return name in handlers if handlers else None


def has_handler(socket: str, name: str, kind: str) -> bool | None:
    """Ask an engine whether it has a handler.

    Args:
        socket: where it serves the CRI.
        name: the handler's.
        kind: the type that it has to have.

    Returns:
        None if it does not tell.

    Raises:
        ConnectionError: it does not answer, or not yet: it has only just been started.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)
            with contextlib.suppress(ConnectionError):
                os.write(writer, json.dumps(_ask(socket, name, kind)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    try:
        ready, _, _ = select.select([reader], [], [], _TIMEOUT)
        answer = os.read(reader, _LONGEST) if ready else b""
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if not answer:
        raise ConnectionError(socket)
    known = json.loads(answer)
    return known if isinstance(known, bool) else None


def _ask(socket: str, name: str, kind: str) -> bool | None:
    from api.proto import cri_pb2 as pb  # noqa: PLC0415 - in the child alone
    from integration.cri.client import Cri  # noqa: PLC0415
    from integration.cri.errors import CriError, CriRefused  # noqa: PLC0415

    try:
        with Cri(socket) as cri:
            answer = cri.status(pb.StatusRequest(verbose=True), timeout=_TIMEOUT / 2)
    except CriRefused as error:
        if error.status == Status.UNIMPLEMENTED:
            return None
        # containerd's CRI refuses everything until it has started.
        raise ConnectionError(socket) from error
    except CriError as error:
        raise ConnectionError(socket) from error
    handlers = [handler.name for handler in answer.runtime_handlers]
    return knows(dict(answer.info), handlers, name, kind)
