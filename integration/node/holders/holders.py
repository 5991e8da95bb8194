"""Which container holds which GPU: the containers of a node, held against its inventory.

Rules
- A container holds devices from before its processes are made until its init has ended: one that is
  being made has its record already, and one that has stopped is only waiting to be deleted.
- What it holds is told by :mod:`integration.containers.held_devices`. The nodes of a privileged
  container say nothing: it has all of the host's, and so it holds what the kubelet has given it.
- A holding is stale if the driver that its container was made with is no more.
- A holding is an orphan if its container runs and its shim does not, or if the kubelet does not
  know its pod, neither before its bundle is read nor afterwards: pods come and go meanwhile. A
  kubelet that does not answer knows them all.

Source: :mod:`hooks.record`; Kubernetes, pkg/kubelet/apis/podresources.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from hooks.node.identity import what_changed
from hooks.node.inventory import Inventory
from hooks.sharing import gpus_of
from integration.containers.held_devices import devices_of, is_privileged
from integration.containers.shares import shares_of
from integration.containers.shims import has_shim
from integration.kubelet.values import Allocated
from integration.node.holders.values import Holding, Unheld

if TYPE_CHECKING:
    from integration.containers.bundles import Container
    from integration.containers.procfs import Procfs

_UUIDS: Final = ("GPU-", "MIG-")

UNKNOWN_POD: Final = "the kubelet does not know its pod"


def holdings_of(
    containers: Iterable[Container],
    inventory: Inventory | None,
    procfs: Procfs,
    allocated: Allocated | None = None,
) -> tuple[Holding, ...]:
    """What each container holds.

    Args:
        inventory: what the node has; None if that is not known, and then only records tell.
        allocated: what the kubelet says; None if it says nothing.

    Returns:
        Of each container that holds something, what, and what is wrong with that.
    """
    found = []
    for container in containers:
        if container.sandbox or container.has_stopped:
            continue
        devices, gpus = devices_of(container, inventory)
        if not devices and (named := _given_to(container, allocated)) and is_privileged(container):
            devices, gpus = named, gpus_of(named, inventory)
        if devices:
            found.append(
                Holding(
                    container,
                    devices,
                    gpus,
                    stale=stale_of(container),
                    orphan=_orphan(container, procfs, allocated),
                    shares=shares_of(container),
                )
            )
    return tuple(found)


def stopped_of(containers: Iterable[Container], inventory: Inventory | None) -> tuple[Holding, ...]:
    """What those held whose init has ended.

    Args:
        inventory: what the node has; None if that is not known, and then only records tell.
    """
    held = (
        Holding(each, *devices_of(each, inventory))
        for each in containers
        if not each.sandbox and each.has_stopped
    )
    return tuple(each for each in held if each.devices)


def _given_to(container: Container, allocated: Allocated | None) -> tuple[str, ...]:
    """What the kubelet has given to a container, of devices that it calls by their UUIDs."""
    pod = container.pod
    if pod is None or allocated is None:
        return ()
    given = allocated.get((pod.namespace, pod.name), {}).get(container.name, ())
    named = (_of_share(device) for _, device in given)
    return tuple(dict.fromkeys(device for device in named if device.startswith(_UUIDS)))


def stale_of(container: Container) -> str:
    """What of the driver that a container was made with is no more; "" for nothing."""
    try:
        return what_changed(container.record or {})
    except (KeyError, TypeError, ValueError):  # the record is damaged, or of another version
        return ""


def _orphan(container: Container, procfs: Procfs, allocated: Allocated | None) -> str:
    if container.pid and not has_shim(container.pid, procfs):
        return "its shim is gone, and it runs on"
    pod = container.pod
    if pod and allocated is not None and (pod.namespace, pod.name) not in allocated:
        return UNKNOWN_POD
    return ""


def unheld_of(
    allocated: Allocated, holdings: Iterable[Holding], containers: Iterable[Container] = ()
) -> tuple[Unheld, ...]:
    """What the kubelet has given, and nobody has; of devices that it calls by their UUIDs.

    Args:
        allocated: what the kubelet says.
        containers: those of which it is known what they hold. One that runs without what it was
            given is told of.
    """
    held = {
        (pod.namespace, pod.name, each.container.name, device)
        for each in holdings
        if (pod := each.container.pod) is not None
        for device in each.devices
    }
    running = {
        (pod.namespace, pod.name, each.name): (each.pid, pod.uid)
        for each in containers
        if (pod := each.pod) is not None and each.pid and not each.sandbox
    }
    return tuple(
        Unheld(*pod, name, resource, device, *running.get((*pod, name), (0, "")))
        for pod, given in allocated.items()
        for name, devices in given.items()
        for resource, device in devices
        if device.startswith(_UUIDS) and (*pod, name, _of_share(device)) not in held
    )


def _of_share(device: str) -> str:
    """The UUID of a device, of which "UUID::N" is one share."""
    return device.partition("::")[0]
