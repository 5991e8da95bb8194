"""The CDI spec of a claim: one file for each claim, which any runtime reads.

``DIRECTORY/k8s.DRIVER-claim_UID.json``, of the kind ``k8s.DRIVER/claim``, has a device ``UID-NAME``
for each device of the claim, or ``UID-NAME-SHARE`` for a share of one. The edits are those of the
device plugin's specs (:mod:`hooks.cdi.generating`): the driver's files, the device's nodes, and
``NVIDIA_VISIBLE_DEVICES=void``, so that an image that asks for all GPUs gets no other. A shared
device has further edits (:func:`.sharing.edits_of`).

Rules
- The file exists before the kubelet receives its CDI names. Runtimes read the directory again when
  a name is unknown, and every claim has its own names.
- The file stays when the agent exits, since restarted containers need it. If it is removed, or the
  node's devices change, it is generated again.
- An agent that was killed may leave the file of a claim that is not in the checkpoint. It is
  removed.
- A pod has to wait for its claim's file. So the common edits are generated only once for the node,
  and the JSON has no line breaks.

Source: CDI specification; containerd, pkg/cdi (by its library's cache).
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from hooks.cdi import generating, schema
from hooks.cdi.errors import CdiNotGenerated
from hooks.cdi.spec import Edits, SpecDevice, SpecFile, fault_of
from hooks.cdi.tree import number_of
from hooks.config import Config
from hooks.errors import InventoryError, RequestError
from hooks.node.inventory import Inventory
from integration.agent_errors import ClaimedDeviceMissing, DraStateUnwritten, MpsNotReady
from integration.cdi.writing import write
from integration.files import read_file, remove_file
from integration.files import sweep as sweep_replaced
from integration.node.services.dra.devices import Device
from integration.node.services.dra.sharing import edits_of
from integration.node.values.claims import Claim, ClaimDevice

__all__ = ["SpecTemplate", "generate", "keep", "name_of", "path_of", "remove", "sweep"]

_CLASS: Final = "claim"
_SUFFIX: Final = ".json"
_COMMON: Final = ("annotations", "containerEdits")


def name_of(driver: str, uid: str, device: ClaimDevice) -> str:
    """Return the full CDI name of a device of a claim."""
    return f"{_vendor(driver)}/{_CLASS}={_name_of(uid, device)}"


def path_of(config: Config, driver: str, uid: str) -> str:
    """Return the path of a claim's spec."""
    return os.path.join(config.cdi_spec_dirs[-1], f"{_vendor(driver)}-{_CLASS}_{uid}{_SUFFIX}")


@dataclass(frozen=True, slots=True)
class SpecTemplate:
    """What the specs of all claims have in common."""

    spec: SpecFile  # without devices and common edits
    devices: Mapping[str, SpecDevice]  # by UUID, each with its own edits
    common: Mapping[str, Any]  # the edits that every device needs, as JSON
    version: str  # the minimum version of the CDI specification


def generate(
    driver: str, devices: Iterable[Device], inventory: Inventory, config: Config
) -> SpecTemplate | None:
    """Return the template for specs of these devices; None if no spec can be generated.

    It lacks MIG devices of drivers before 470, whose UUIDs are not valid names in CDI.
    """
    given = (device.uuid for device in devices if device.can_be_given)
    uuids = tuple(uuid for uuid in given if not fault_of("device", uuid))
    request = generating.SpecOptions(
        vendor=_vendor(driver),
        class_=_CLASS,
        strategies=("uuid",),
        capabilities=generating.DEFAULT_CAPABILITIES.intersection(config.supported_capabilities),
        devices=uuids,
        all_device=False,
        groups=False,
    )
    if not uuids:
        return None
    try:
        every = generating.generate(request, inventory, config)
    except (CdiNotGenerated, InventoryError, RequestError):
        return None
    tree = schema.to_tree(every)
    return SpecTemplate(
        replace(every, devices=(), edits=Edits()),
        {device.name: device for device in every.devices},
        {key: tree[key] for key in _COMMON if key in tree},
        schema.minimum_version(tree),
    )


def keep(
    config: Config, driver: str, claim: Claim, template: SpecTemplate | None, mps_root: str = ""
) -> bool:
    """Write the spec of a claim, unless the file is up to date.

    Args:
        template: the result of :func:`generate`.
        mps_root: the directory of MPS on the host; "" if unknown.

    Returns:
        Whether it was written.

    Raises:
        ClaimedDeviceMissing: the driver does not have one of the devices at present.
        MpsNotReady: a daemon is needed, but ``mps_root`` is unknown.
        CdiSpecUnwritten: the file cannot be written.
        DraStateUnwritten: the existing file cannot be read.
    """
    by_uuid = template.devices if template is not None else {}
    gone = next((each for each in claim.devices if each.uuid not in by_uuid), None)
    if template is None or gone is not None:
        raise ClaimedDeviceMissing(
            f"the device {(gone or claim.devices[0]).device} of {claim}",
            found="the driver does not list it now",
            do="see `nvshim list` on the node",
        )
    if not mps_root and any(each.sharing.daemon for each in claim.devices):
        raise MpsNotReady(
            f"to share the devices of {claim} by MPS",
            found="the device plugin's settings, which name the directory of MPS, are unknown",
            do="see the node agent's faults in `nvshim doctor`; the kubelet retries",
        )
    devices = {}
    for each in claim.devices:
        name = _name_of(claim.uid, each)
        edits = _united(by_uuid[each.uuid].edits, edits_of(each, mps_root))
        devices[name] = replace(by_uuid[each.uuid], name=name, edits=edits)
    tree = schema.to_tree(replace(template.spec, devices=tuple(devices.values())))
    # A name may start with a digit, as UIDs do, only in newer versions.
    version = max(schema.minimum_version(tree), template.version, key=number_of)
    text = f"{json.dumps({**tree, 'cdiVersion': version, **template.common})}\n"
    path = path_of(config, driver, claim.uid)
    try:
        if read_file(path) == text.encode():
            return False
    except OSError as error:
        raise DraStateUnwritten(f"to keep {path}", found=error.strerror or str(error)) from error
    write(path, text, durable=False)  # a reboot ends all claims
    return True


def remove(config: Config, driver: str, uid: str) -> None:
    """Remove the spec of a claim, if there is one.

    Raises:
        DraStateUnwritten: the spec cannot be removed.
    """
    path = path_of(config, driver, uid)
    try:
        if os.path.lexists(path):
            remove_file(path, durable=False)  # as in the write
    except OSError as error:
        raise DraStateUnwritten(f"to remove {path}", found=error.strerror or str(error)) from error


def sweep(config: Config, driver: str, uids: Collection[str]) -> None:
    """Remove all specs except those of these claims, and temporary files left by writes.

    Raises:
        DraStateUnwritten: a spec cannot be removed.
    """
    directory = config.cdi_spec_dirs[-1]
    start = f"{_vendor(driver)}-{_CLASS}_"
    try:
        names = os.listdir(directory)
    except OSError:
        return  # the directory does not exist
    for name in names:
        if name.startswith(start) and name.endswith(_SUFFIX):
            uid = name.removeprefix(start).removesuffix(_SUFFIX)
            if uid not in uids:
                remove(config, driver, uid)
        elif name.startswith(f".{start}"):
            spec = name.removeprefix(".").partition(_SUFFIX)[0] + _SUFFIX
            sweep_replaced(os.path.join(directory, spec))


def _name_of(uid: str, device: ClaimDevice) -> str:
    share = f"-{device.share}" if device.share else ""
    return f"{uid}-{device.device}{share}"


def _united(edits: Edits, more: Edits) -> Edits:
    return replace(edits, env=(*edits.env, *more.env), mounts=(*edits.mounts, *more.mounts))


def _vendor(driver: str) -> str:
    return f"k8s.{driver}"
