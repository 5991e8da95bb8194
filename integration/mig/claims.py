"""Find the resource claims that hold a GPU or a part of it.

A claim may be prepared before any of its containers exists. The DRA driver first writes a claim
into its checkpoint, and then looks for marks of devices that are out of service. So if the mark of
a GPU is written before the claims are read, the driver refuses each claim, or it is listed here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from hooks.config import Config
from hooks.node.gpus import Gpu
from integration.devices.targets import Target
from integration.drain.holders import CLAIM, Holder
from integration.node.services.dra.mig_create import MigCreator, MigModes
from integration.node.state.claims_file import claims_of
from integration.node.values.claims import gpu_of

__all__ = ["claim_holders"]


def claim_holders(
    config: Config, gpus: Iterable[Gpu], targets: Collection[Target]
) -> Iterator[Holder]:
    """Yield the claims on devices to destroy, and those that the DRA driver partitions a GPU for.

    A claim ends with its pod. The driver destroys the devices that it created for the claim a
    moment later; until then they are listed, too.

    Args:
        gpus: the GPUs that change.
        targets: the devices that are destroyed.
    """
    names = {gpu.uuid: f"GPU {gpu.index}" for gpu in gpus}
    destroyed = {each.device: each.name for each in targets}
    claims = claims_of(config)
    for claim in claims:
        held = {
            destroyed.get(each.uuid) or destroyed.get(each.gpu) or names.get(gpu_of(each.device))
            for each in claim.held
            if not each.admin
        }
        if found := sorted(filter(None, held)):
            yield Holder(CLAIM, str(claim), devices=tuple(found))
    creator, modes = MigCreator(config), MigModes(config)
    creator.load()
    modes.load()
    for note in creator.orphans({claim.uid: claim for claim in claims}):
        if note.part.gpu in names:
            yield Holder(CLAIM, f"{note.title}, which has ended", devices=(names[note.part.gpu],))
    for uuid in sorted(modes.switched - creator.gpus()):
        if uuid in names:
            yield Holder(CLAIM, "a claim that has ended", devices=(names[uuid],))
