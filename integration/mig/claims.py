"""Resource claims that have a GPU, or a part of it; as holders.

A claim may be prepared although none of its containers exists yet. The DRA driver writes a claim
into its checkpoint first, and looks for marks of what is out of service second. So if the mark of a
GPU is written before the claims are read, each claim is refused by the driver or listed here.
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
    """Yield the claims that have what is destroyed, or that the DRA driver partitions a GPU for.

    Claims end with their pods. The driver destroys what it created for them a moment later; until
    then that is listed, too.

    Args:
        gpus: the GPUs that change.
        targets: what is destroyed.
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
