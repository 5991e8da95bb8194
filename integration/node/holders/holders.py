"""Find the containers that hold a node's GPUs.

Rules
- A container holds devices from before its processes are created until its init has exited. A
  container that is being created already has its record. One that has stopped is only waiting to be
  deleted.
- :mod:`integration.containers.held_devices` finds the devices. A privileged container has every
  node of the host, so it holds what the kubelet has assigned to it.
- A holding is stale if the driver from the container's creation was removed.
- A holding is an orphan if its container runs without its shim, or if the kubelet does not know its
  pod. The kubelet is asked both before and after the bundle is read, since pods come and go. A
  kubelet that does not answer counts as knowing all pods.

Source: :mod:`hooks.record`; Kubernetes, pkg/kubelet/apis/podresources.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from hooks.node.identity import what_changed
from hooks.node.inventory import Inventory
from hooks.sharing import gpus_of
from integration.containers.bundles import Container
from integration.containers.held_devices import devices_of, is_privileged
from integration.containers.procfs import Procfs
from integration.containers.shares import shares_of
from integration.containers.shims import has_shim
from integration.kubelet.values import Allocated
from integration.node.holders.values import Holding, Unheld

_UUIDS: Final = ("GPU-", "MIG-")

UNKNOWN_POD: Final = "the kubelet does not know its pod"


def holdings_of(
    containers: Iterable[Container],
    inventory: Inventory | None,
    procfs: Procfs,
    allocated: Allocated | None = None,
) -> tuple[Holding, ...]:
    """Return the holding of each container that has devices, with its faults.

    Args:
        inventory: the node's devices; None if unknown, and then only records count.
        allocated: the kubelet's assignments; None if it does not answer.
    """
    holdings = []
    for container in containers:
        if container.sandbox or container.has_stopped:
            continue
        devices, gpus = devices_of(container, inventory)
        if (
            not devices
            and (assigned := _assigned_to(container, allocated))
            and is_privileged(container)
        ):
            devices, gpus = assigned, gpus_of(assigned, inventory)
        if devices:
            holdings.append(
                Holding(
                    container,
                    devices,
                    gpus,
                    stale=stale_of(container),
                    orphan=_orphan(container, procfs, allocated),
                    shares=shares_of(container),
                )
            )
    return tuple(holdings)


def stopped_of(containers: Iterable[Container], inventory: Inventory | None) -> tuple[Holding, ...]:
    """Return the holdings of stopped containers.

    Args:
        inventory: the node's devices; None if unknown, and then only records count.
    """
    held = (
        Holding(each, *devices_of(each, inventory))
        for each in containers
        if not each.sandbox and each.has_stopped
    )
    return tuple(each for each in held if each.devices)


def _assigned_to(container: Container, allocated: Allocated | None) -> tuple[str, ...]:
    """Return the devices that the kubelet has assigned to a container, by UUID."""
    pod = container.pod
    if pod is None or allocated is None:
        return ()
    assigned = allocated.get((pod.namespace, pod.name), {}).get(container.name, ())
    uuids = (_device_of(device) for _, device in assigned)
    return tuple(dict.fromkeys(device for device in uuids if device.startswith(_UUIDS)))


def stale_of(container: Container) -> str:
    """Return which part of the container's driver was removed; "" for none."""
    try:
        return what_changed(container.record or {})
    except (KeyError, TypeError, ValueError):  # the record is damaged, or another version wrote it
        return ""


def _orphan(container: Container, procfs: Procfs, allocated: Allocated | None) -> str:
    if container.pid and not has_shim(container.pid, procfs):
        return "its shim is gone, but it still runs"
    pod = container.pod
    if pod and allocated is not None and (pod.namespace, pod.name) not in allocated:
        return UNKNOWN_POD
    return ""


def unheld_of(
    allocated: Allocated, holdings: Iterable[Holding], containers: Iterable[Container] = ()
) -> tuple[Unheld, ...]:
    """Return the devices that the kubelet has assigned and no container holds, by UUID.

    Args:
        allocated: the kubelet's assignments.
        containers: those whose devices are known. If one of them runs without its assigned device,
            the answer names it.
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
        for pod, containers_of_pod in allocated.items()
        for name, devices in containers_of_pod.items()
        for resource, device in devices
        if device.startswith(_UUIDS) and (*pod, name, _device_of(device)) not in held
    )


def _device_of(device: str) -> str:
    """Return the UUID of a device; "UUID::N" is one share of it."""
    return device.partition("::")[0]
