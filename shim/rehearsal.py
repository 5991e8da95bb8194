"""What every shim does at its start, done for nobody: by the fork server.

A process that was forked shares its memory until it writes to it, and Python writes wherever it
executes: it counts references, and fits its bytecode to what it meets. The fork server rehearses,
so that its children find that done. Nobody can tell that it happened, but by the clock: nothing
is started, and what is made for it is gone at the end.

Source: fork(2), Notes, on copy-on-write.
"""

from __future__ import annotations

import os
import signal
import socket
from typing import Final

from api import aio
from api.errors import NvshimError
from api.proto import task_pb2
from api.ttrpc import connect
from shim import address, handleroptions, invocation, server, sockets, wire
from shim.log import Log
from shim.service import OwnSocket
from shim.warmstart import LENGTH, surroundings
from shim.warmverb import VerbRequest

_TASK: Final = "containerd.task.v2.Task"
_NOBODY: Final = "rehearsal"
_SIGNALS: Final = (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT, signal.SIGUSR1)


def rehearse(path: str) -> None:
    """Start a shim that does nothing, call it once, and end it, all in this process.

    Args:
        path: where to listen meanwhile.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        _rehearse_verb(path)
        _rehearse_shim(path)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _rehearse_verb(path: str) -> None:
    words = ["-namespace", _NOBODY, "-address", path, "-id", _NOBODY, "start"]
    texts = ["/", str(len(words)), *words, "PATH=/bin", "TTRPC_ADDRESS=/"]
    content = b"".join(os.fsencode(text) + b"\0" for text in texts)
    LENGTH.pack(len(content))
    request = VerbRequest.decode(content)
    surroundings()
    asked = invocation.parse(request.words)
    read = wire.read_bootstrap(b"", container_id=asked.container_id, namespace=asked.namespace)
    handleroptions.text_option([], "ShimCgroup")
    directory = os.path.dirname(path)
    group = address.group_of(directory, asked.container_id)
    address.socket_directories("", request.environment, os.geteuid())
    name = address.socket_name(asked.address, asked.namespace, group)
    address.socket_path(sockets.prepare_directory([directory]), name)
    wire.bootstrap_result(address.SCHEME + path) if read else b""


def _rehearse_shim(path: str) -> None:
    listener = sockets.listen(path)
    if listener is None:
        return
    # By a descriptor of it a socket is found that has no name any more, so that none can be left.
    file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    os.unlink(path)
    try:
        aio.run(_serve_and_call, socket.socket(fileno=listener), f"/proc/self/fd/{file}")
    finally:
        os.close(file)


async def _serve_and_call(listener: socket.socket, path: str) -> None:
    own_socket = OwnSocket(path, None)
    log = Log(os.devnull, debug=False, shim=_NOBODY, namespace=_NOBODY)
    async with aio.create_task_group() as tasks:
        tasks.start_soon(server.serve, listener, own_socket, (_NOBODY, path), log, _stay)
        async with connect(path) as client:
            request = task_pb2.ConnectRequest(id=_NOBODY)
            try:
                await client.call(_TASK, "Connect", request, task_pb2.ConnectResponse)
            except NvshimError:
                pass  # there is no such container
        tasks.cancel_scope.cancel()


def _stay() -> None:
    """Do not end the process."""
