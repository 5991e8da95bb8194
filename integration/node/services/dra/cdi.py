"""The CDI specs of claims: one file each, which any runtime reads.

``DIRECTORY/k8s.DRIVER-claim_UID.json``, of the kind ``k8s.DRIVER/claim``, has a device ``UID-NAME``
for each device of the claim, or ``UID-NAME-SHARE`` for a share of one. The edits are those of the
device plugin's specs (:mod:`hooks.cdi.generating`): the driver's files, the device's nodes, and
``NVIDIA_VISIBLE_DEVICES=void``, by which an image that wants all GPUs gets no other. A device that
is shared has, besides, what its containers need for that (:func:`.sharing.edits_of`).

Rules
- A file is there before the kubelet is told its names. Runtimes read it again for a name that they
  do not know, and each claim has names of its own.
- It stays when the agent ends: containers are started again by it, which nobody asks for anew. If
  it goes all the same, or what is on the node changes, it is made anew.
- A file of ours whose claim is not prepared is what an agent has left that was killed. It goes.
- A pod waits for its claim's file. So what all of them have is made once for the node, and they
  have no line for each value.

Source: CDI specification; containerd, pkg/cdi (by its library's cache).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from hooks.cdi import generating, schema
from hooks.cdi.errors import CdiNotGenerated
from hooks.cdi.spec import Edits
from hooks.cdi.tree import number_of
from hooks.errors import InventoryError, RequestError
from integration.agent_errors import ClaimedDeviceMissing, DraStateUnwritten, MpsNotReady
from integration.cdi.writing import write
from integration.files import read_file, remove_file
from integration.files import sweep as sweep_replaced
from integration.node.services.dra.sharing import edits_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from hooks.cdi.spec import SpecDevice, SpecFile
    from hooks.config import Config
    from hooks.node.inventory import Inventory
    from integration.node.services.dra.devices import Device
    from integration.node.values.claims import Claim, ClaimDevice

__all__ = ["Template", "generate", "keep", "name_of", "path_of", "remove", "sweep"]

_CLASS: Final = "claim"
_SUFFIX: Final = ".json"
_COMMON: Final = ("annotations", "containerEdits")


def name_of(driver: str, uid: str, device: ClaimDevice) -> str:
    """The full CDI name of a device of a claim."""
    return f"{_vendor(driver)}/{_CLASS}={_name_of(uid, device)}"


def path_of(config: Config, driver: str, uid: str) -> str:
    """Where the spec of a claim is."""
    return os.path.join(config.cdi_spec_dirs[-1], f"{_vendor(driver)}-{_CLASS}_{uid}{_SUFFIX}")


@dataclass(frozen=True, slots=True)
class Template:
    """What the specs of claims are made of."""

    spec: SpecFile  # without devices and their common edits
    devices: Mapping[str, SpecDevice]  # by UUID, each as its own edits are
    common: Mapping[str, Any]  # what comes with any device, as it is written down
    version: str  # of the CDI specification that all of it needs


def generate(
    driver: str, devices: Iterable[Device], inventory: Inventory, config: Config
) -> Template | None:
    """What the specs of claims for devices are made of; None if there is nothing to be had."""
    uuids = tuple(device.uuid for device in devices if device.can_be_given)
    wish = generating.SpecOptions(
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
        every = generating.generate(wish, inventory, config)
    except (CdiNotGenerated, InventoryError, RequestError):
        return None
    tree = schema.to_tree(every)
    return Template(
        replace(every, devices=(), edits=Edits()),
        {device.name: device for device in every.devices},
        {key: tree[key] for key in _COMMON if key in tree},
        schema.minimum_version(tree),
    )


def keep(
    config: Config, driver: str, claim: Claim, template: Template | None, mps_root: str = ""
) -> bool:
    """Have the spec of a claim be there, as it should be.

    Args:
        template: what :func:`generate` has made; None for nothing.
        mps_root: the host's directory of MPS; "" if it is not known yet.

    Returns:
        Whether it had to be written.

    Raises:
        ClaimedDeviceMissing: a device of it cannot be given now.
        MpsNotReady: where its daemon is, is not known now.
        CdiSpecUnwritten: it cannot be written.
        DraStateUnwritten: what is in its place cannot be read.
    """
    by_uuid = template.devices if template is not None else {}
    gone = next((each for each in claim.devices if each.uuid not in by_uuid), None)
    if template is None or gone is not None:
        raise ClaimedDeviceMissing(
            f"the device {(gone or claim.devices[0]).device} of {claim}",
            found="the driver does not have it now",
            do="see `nvshim list` on the node",
        )
    if not mps_root and any(each.sharing.daemon for each in claim.devices):
        raise MpsNotReady(
            f"to share the devices of {claim} by MPS",
            found="where MPS has its files is not known, nor the device plugin's settings",
            do="see the node agent's faults in `nvshim doctor`; it is tried again",
        )
    devices = {}
    for each in claim.devices:
        name = _name_of(claim.uid, each)
        edits = _united(by_uuid[each.uuid].edits, edits_of(each, mps_root))
        devices[name] = replace(by_uuid[each.uuid], name=name, edits=edits)
    tree = schema.to_tree(replace(template.spec, devices=tuple(devices.values())))
    # Names that begin with a digit, as a UID may, are younger than others.
    version = max(schema.minimum_version(tree), template.version, key=number_of)
    text = f"{json.dumps({**tree, 'cdiVersion': version, **template.common})}\n"
    path = path_of(config, driver, claim.uid)
    try:
        if read_file(path) == text.encode():
            return False
    except OSError as error:
        raise DraStateUnwritten(f"to keep {path}", found=error.strerror or str(error)) from error
    write(path, text, durable=False)  # after a boot nothing is prepared
    return True


def remove(config: Config, driver: str, uid: str) -> None:
    """Remove the spec of a claim, if it is there.

    Raises:
        DraStateUnwritten: it cannot be removed.
    """
    path = path_of(config, driver, uid)
    try:
        if os.path.lexists(path):
            remove_file(path, durable=False)  # as it was written
    except OSError as error:
        raise DraStateUnwritten(f"to remove {path}", found=error.strerror or str(error)) from error


def sweep(config: Config, driver: str, uids: Collection[str]) -> None:
    """Remove the specs of all claims but these, and what was not put in place of any.

    Raises:
        DraStateUnwritten: one of them cannot be removed.
    """
    directory = config.cdi_spec_dirs[-1]
    start = f"{_vendor(driver)}-{_CLASS}_"
    try:
        names = os.listdir(directory)
    except OSError:
        return  # there are none
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
