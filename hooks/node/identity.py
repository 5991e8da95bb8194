"""What of the driver a container was made with, so that a change is told before it runs.

Between the create and the start of a container the driver may be exchanged under it; between
that of a restored one, whole days may lie. What was mounted then is of the old driver, and the
kernel module of the new: every NVIDIA program would fail, each in its own words. So the record
keeps, as observations of :mod:`hooks.node.witness`,

- what the loaded kernel module says of its version;
- the identity of each of the driver's files that was mounted (a driver container that was
  restarted has the same files anew, and what was mounted of the old one is gone);
- the numbers of each device node (nvidia-uvm and nvidia-caps have others after a reload).

Files of ours, sockets of services and nodes of other vendors are not among them: they come and
go without harm. To compare takes a tenth of a millisecond.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hooks.config import Config
from hooks.errors import DriverChanged
from hooks.node.driver_version import module_files, module_version
from hooks.node.witness import Witness, first_change

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hooks.edits.plan import Plan
    from hooks.node.inventory import Inventory

__all__ = ["identity_of", "refuse_changed", "what_changed"]


def identity_of(plan: Plan, inventory: Inventory | None, config: Config) -> dict[str, Any] | None:
    """What a container is made with.

    Args:
        plan: what it is given.
        inventory: what the node has of NVIDIA's driver; None if nothing of it is given.
        config: where procfs and sysfs are.

    Returns:
        Values that JSON has, for the record; None without a driver.
    """
    if inventory is None:
        return None
    driver = inventory.driver
    witness = Witness("/")
    for path in module_files(config):
        witness.observe("text", path)
    files = {library.source for library in driver.libraries}
    files |= {file.source for file in driver.files}
    for mount in plan.mounts:
        if mount.source in files:
            witness.observe("stat", mount.source)
    for device in plan.devices:
        node = inventory.nodes.usable.get(device.path)
        if node is not None and node.host:
            witness.observe("number", node.host)
    return {
        "driver": driver.version,
        "proc": config.proc,
        "sys": config.sys,
        "modules": list(module_files(config)),
        "observations": [[kind, path, seen] for (kind, path), seen in witness.observations.items()],
    }


def what_changed(record: Mapping[str, Any]) -> str:
    """What of the driver is not any more what a container was made with.

    Args:
        record: of its injection, as it was made or as JSON has it.

    Returns:
        One clause for people; "" if nothing has changed, or nothing is recorded.
    """
    identity = record.get("identity")
    if not isinstance(identity, dict):
        return ""
    then = identity["driver"]
    now = module_version(Witness("/"), Config(proc=identity["proc"], sys=identity["sys"]))
    if now is not None and now != then:
        return f"it was made with driver {then}, and the loaded kernel module is {now}"
    path = first_change(identity["observations"])
    if path is None:
        return ""
    if path in identity["modules"]:
        loaded = "was loaded anew" if now else "is loaded no more"
        return f"it was made with driver {then}, whose kernel module {loaded}"
    return f"{path} is not the one that it was made with"


def refuse_changed(record: Mapping[str, Any], name: str) -> None:
    """Refuses to start a container with another driver than it was made with.

    Args:
        record: of its injection.
        name: the container's id.

    Raises:
        DriverChanged: the driver has changed since.
    """
    changed = what_changed(record)
    if changed:
        raise DriverChanged(
            f"to start {name} with the GPUs that it was given",
            found=changed,
            do="delete the task and create it again",
        )
