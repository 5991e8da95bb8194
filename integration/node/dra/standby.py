"""The second instance of the driver, in a rolling update: it serves the kubelet by the first.

::

    kubelet ─▶ our sockets ─▶ the common socket of whoever is at work
    its lock is free ─▶ what is on disk is read ─▶ calls at our sockets are answered here

Rules
- All that the agent does besides begins with the lock, so that nothing is done twice: slices, CDI
  specs, the device plugin's sockets, the metrics' port.
- Our sockets stay as they are when the node becomes ours: a kubelet that has registered us hears of
  nothing.
- A pod is ready when it serves. Then its predecessor is told to end.

Source: Kubernetes, DaemonSet, ``maxSurge``; kubelet pkg/kubelet/cm/dra/plugin.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hooks.node.kubelet import kubelet_root
from integration.node.dra.places import places_of
from integration.node.dra.relaying import Relay
from integration.node.dra.serving import Serving

if TYPE_CHECKING:
    import anyio.abc

    from integration.node.components import Context
    from integration.node.lock import NodeLock

__all__ = ["stand_by"]


async def stand_by(tasks: anyio.abc.TaskGroup, context: Context, lock: NodeLock) -> Context:
    """Serve by another agent until the node is ours.

    Args:
        tasks: where the sockets are served, from now on.

    Returns:
        What the parts are given then.
    """
    options = context.options
    places = places_of(kubelet_root(context.config), options.dra_driver, options.pod_uid)
    serving = Serving(context, Relay(places.common))

    async def show() -> None:
        await serving.in_place.wait()
        lock.show_pod(options.pod_uid)

    context.say("info", "waits for the end of another agent", process=lock.holder)
    tasks.start_soon(serving.run)
    tasks.start_soon(show)
    await lock.wait()
    serving.succeed()
    return replace(context, serving=serving)
