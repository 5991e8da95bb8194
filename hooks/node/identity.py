"""Record a container's driver at create, to notice a change before the start.

The driver may be replaced between the create and the start of a container, or in the days before a
restore. The mounted files then belong to the old driver, and the kernel module to the new one:
every NVIDIA program would fail, each with its own message. So the record keeps these observations
(:mod:`hooks.node.fingerprint`):

- the version of the loaded kernel module;
- the identity of each mounted or layered driver file (a restarted driver container has new copies,
  and the mounted old ones are gone);
- the numbers of each device node (those of nvidia-uvm and nvidia-caps change at a reload).

Our own files, services' sockets and other vendors' nodes are not included, since they may change.
The comparison takes a tenth of a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hooks.config import Config
from hooks.errors import DriverChanged
from hooks.node.fingerprint import Fingerprint, first_change, read_text
from hooks.node.inventory import Inventory
from hooks.node.roots import module_files, module_version
from hooks.plan import Mount, Plan


def identity_of(
    plan: Plan, layered: Iterable[Mount], inventory: Inventory | None, config: Config
) -> dict[str, Any] | None:
    """Return a container's driver, as JSON for the record; None without a driver.

    Args:
        layered: mounts whose files are in a layer instead.
        inventory: the node's NVIDIA driver; None if the container gets no part of it.
    """
    if inventory is None:
        return None
    seen: dict[tuple[str, str], Any] = {("text", p): read_text(p) for p in module_files(config)}
    files = inventory.files or {}
    sources = [mount.source for mount in (*layered, *plan.mounts)]
    seen |= {("stat", source): files[source] for source in sources if source in files}
    for device in plan.devices:
        node = inventory.nodes.usable.get(device.path)
        if node is not None and node.host:
            seen["number", node.host] = [node.major, node.minor]
    return {
        "driver": inventory.driver.version,
        "proc": config.proc,
        "sys": config.sys,
        "modules": list(module_files(config)),
        "observations": [[kind, path, value] for (kind, path), value in seen.items()],
    }


def what_changed(record: Mapping[str, Any]) -> str:
    """Describe how the driver has changed since the create; return "" if it has not."""
    identity = record.get("identity")
    if not isinstance(identity, dict):
        return ""
    then = identity["driver"]
    now = module_version(Fingerprint("/"), Config(proc=identity["proc"], sys=identity["sys"]))
    if now is not None and now != then:
        return f"it was made with driver {then}, and the loaded kernel module is {now}"
    path = first_change(identity["observations"])
    if path is None:
        return ""
    if path in identity["modules"]:
        loaded = "was reloaded" if now else "was unloaded"
        return f"it was made with driver {then}, whose kernel module {loaded}"
    return f"{path} is not the one that it was made with"


def refuse_changed(record: Mapping[str, Any], name: str) -> None:
    """Refuse to start a container with another driver than it was created with.

    Raises:
        DriverChanged: the driver has changed since then.
    """
    changed = what_changed(record)
    if changed:
        raise DriverChanged(
            f"to start {name} with the GPUs that it was given",
            found=changed,
            do="delete the task and create it again",
        )
