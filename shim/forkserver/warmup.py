"""Run the steps of every shim's start once in the fork server.

A forked process shares its memory until it writes to it, and Python writes wherever it executes: it
counts references, and specializes its bytecode. A warmup in the fork server does this for its
children. It has no other effect: it starts no program, and removes its files.

Source: fork(2), Notes, on copy-on-write.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.empty_pb2 import Empty

from api.errors import NvshimError
from api.proto import runc_options_pb2, task_pb2
from shim import bundle, files, loop, sockets
from shim.cgroup.moves import ExpectedMoves
from shim.children import Reaper
from shim.forkserver.prefork_pool import VerbRequest
from shim.log import Log
from shim.pod import server
from shim.pod.service import OwnSocket
from shim.pod.ttrpc import Client
from shim.verbs import invocation, start
from shim.verbs.warmstart import LENGTH, process_context

_TASK: Final = "containerd.task.v2.Task"
_NOBODY: Final = "warmup"
# This low-level runtime does not exist, so Create fails when it would start.
_RUNTIME: Final = "/dev/null/runtime"
_SPEC: Final = (
    b'{"ociVersion":"1.0.2","process":{"args":["true"],"cwd":"/","env":["PATH=/bin"]},'
    b'"root":{"path":"rootfs"},"linux":{"namespaces":[{"type":"mount"},{"type":"pid"}]}}'
)
_SIGNALS: Final = (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT, signal.SIGUSR1)


def warm_up(path: str) -> None:
    """Start a shim, call it once, and stop it, in this process.

    Args:
        path: the fork server's socket; the warmup's files are next to it.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        _warm_up_verb(path)
        _warm_up_shim(path)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _warm_up_verb(path: str) -> None:
    words = ["-namespace", _NOBODY, "-address", path, "-id", _NOBODY, "start"]
    texts = ["/", str(len(words)), *words, "PATH=/bin", "TTRPC_ADDRESS=/"]
    content = b"".join(os.fsencode(text) + b"\0" for text in texts)
    LENGTH.pack(len(content))
    request = VerbRequest.decode(content)
    process_context()
    asked = invocation.parse(request.words)
    params = start.read_bootstrap(b"", asked)
    start.shim_cgroup(b"", params)
    directory = os.path.dirname(path)
    group = start.group_of(directory, asked.container_id)
    name = sockets.name_of(asked.address, asked.namespace, group)
    sockets.path_of(sockets.prepare_directory(directory), name)
    start.answer(sockets.SCHEME + path, params)


def _warm_up_shim(path: str) -> None:
    # One fork server at a time has this path. The next one removes a killed one's files.
    bundle_path = f"{path}.bundle"
    path = f"{path}.{os.getpid()}"
    listener = sockets.listen(path)
    if listener is None:
        return
    # Unlink the socket, so that none can be left; its descriptor still leads to it.
    file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    os.unlink(path)
    try:
        os.makedirs(os.path.join(bundle_path, bundle.ROOTFS), 0o700, exist_ok=True)
        files.write(os.path.join(bundle_path, bundle.CONFIG), _SPEC)
        address = f"/proc/self/fd/{file}"
        loop.run(_serve_and_call, socket.socket(fileno=listener), address, bundle_path)
    finally:
        os.close(file)
        files.remove_tree(bundle_path)


def _requests(bundle_path: str) -> list[tuple[str, Any, Any]]:
    options = AnyMessage(
        type_url=runc_options_pb2.Options.DESCRIPTOR.full_name,
        value=runc_options_pb2.Options(binary_name=_RUNTIME, root=bundle_path).SerializeToString(),
    )
    create = task_pb2.CreateTaskRequest(id=_NOBODY, bundle=bundle_path, options=options)
    return [
        ("Connect", task_pb2.ConnectRequest(id=_NOBODY), task_pb2.ConnectResponse),
        ("Create", create, task_pb2.CreateTaskResponse),
        ("Start", task_pb2.StartRequest(id=_NOBODY), task_pb2.StartResponse),
        ("State", task_pb2.StateRequest(id=_NOBODY), task_pb2.StateResponse),
        ("Wait", task_pb2.WaitRequest(id=_NOBODY), task_pb2.WaitResponse),
        ("Kill", task_pb2.KillRequest(id=_NOBODY, signal=signal.SIGTERM), Empty),
        ("Delete", task_pb2.DeleteRequest(id=_NOBODY), task_pb2.DeleteResponse),
    ]


async def _serve_and_call(listener: socket.socket, path: str, bundle_path: str) -> None:
    own_socket = OwnSocket(path, None)
    log = Log(os.devnull, debug=False, shim=_NOBODY, namespace=_NOBODY)
    async with loop.create_task_group() as tasks:
        where = _NOBODY, path
        moves = ExpectedMoves(start=_call)
        serve = partial(
            server.serve, listener, own_socket, where, log, Reaper(), leave=_stay, moves=moves
        )
        tasks.start_soon(serve)
        with await Client.connect(path) as client:
            for method, request, response in _requests(bundle_path):
                try:
                    await client.call(_TASK, method, request, response)
                except NvshimError:
                    pass  # as expected: without a runtime there is no container
        tasks.cancel_scope.cancel()


def _stay() -> None:
    """Do not end the process."""


def _call(function: Callable[..., object], arguments: tuple[object, ...]) -> None:
    """Call a function here: the children would inherit the signal handlers of a first thread."""
    function(*arguments)
