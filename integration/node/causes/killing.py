"""Ending a container by its own shim's Kill, as containerd does: the shim tells of the exit.

Source: containerd docs/runtime-v2.md, "Kill".
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Final

import anyio

from api.errors import NvshimError, one_line
from api.ttrpc.client import connect
from integration.node.errors import ContainerNotKilled
from integration.shim_client import call

if TYPE_CHECKING:
    from integration.inspection.bundles import Container

__all__ = ["kill"]

_SECONDS: Final = 10.0


async def kill(container: Container) -> None:
    """Kill all processes of a container.

    Raises:
        ContainerNotKilled: its shim cannot be asked, or does not do it.
    """
    asked = f"to end the container {container.title}"
    if not container.address:
        raise ContainerNotKilled(asked, found="the address of its shim is not known")
    try:
        with anyio.fail_after(_SECONDS):
            async with connect(container.address) as client:
                await call(
                    client, "Kill", timeout=_SECONDS,
                    id=container.id, signal=int(signal.SIGKILL), all=True,
                )  # fmt: skip
    except (NvshimError, OSError, TimeoutError) as error:
        raise ContainerNotKilled(asked, found=one_line(str(error)) or "no answer") from error
