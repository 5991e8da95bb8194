"""The service for dynamic resource allocation; without ``--dra`` nothing else of it is loaded."""

from __future__ import annotations

import anyio

from integration.node.service import Context

__all__ = ["run"]


async def run(context: Context) -> None:
    """Serve the kubelet and publish the node's devices, until cancelled."""
    if not context.options.dra:
        await anyio.sleep_forever()
    # It loads gRPC and TLS.
    from integration.node.services.dra.driver import run_driver  # noqa: PLC0415

    await run_driver(context)
