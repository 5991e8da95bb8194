"""A process of a shim without containerd, and readers of its output."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from google.protobuf.any_pb2 import Any as AnyMessage

from tests.harness.shim import ShimByHand


async def begin(
    shim: ShimByHand,
    exec_id: str,
    *command: str,
    options: AnyMessage | None = None,
    **stdio: Any,
) -> None:
    """Start the init of c1 with a command; or, with ``exec_id``, an exec in a running c1."""
    if exec_id:
        await shim.run("c1", options=options)
        await shim.start_exec("c1", exec_id, *command, **stdio)
        return
    spec = shim.spec("c1")
    spec["process"]["args"] = list(command)
    shim.write_spec("c1", spec)
    await shim.run("c1", options=options, **stdio)


@contextmanager
def reading(fifo: str, name: str = "copy") -> Iterator[str]:
    """Let another process copy a fifo to a file; yield the file's path."""
    path = f"{fifo}.{name}"
    with open(path, "wb") as file, subprocess.Popen(["cat", fifo], stdout=file) as reader:
        try:
            yield path
            reader.wait(60)
        finally:
            reader.kill()
