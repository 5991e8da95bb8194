"""A process of a shim that is called by hand, and who reads what it writes."""

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
    """Start the init of c1 with a command; or, if one is named, an exec beside its own program."""
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
    """Somebody else reads a fifo to its end, into a file whose path this is."""
    path = f"{fifo}.{name}"
    with open(path, "wb") as file, subprocess.Popen(["cat", fifo], stdout=file) as reader:
        try:
            yield path
            reader.wait(10)
        finally:
            reader.kill()
