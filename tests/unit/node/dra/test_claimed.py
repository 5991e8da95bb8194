"""What the device plugin does not give, since a resource claim has it."""

from __future__ import annotations

from typing import Final

import pytest

from integration.node.dra.values import ClaimDevice
from integration.node.errors import DeviceTaken
from integration.node.plugin.claimed import refuse_claimed, without_claimed
from integration.node.plugin.values import Device, Resource
from tests.unit.node.dra.test_slices import GPUS, PARTS

MIG: Final = Device(PARTS[0], PARTS[0], GPUS[2], "2:0", 2)
OTHER: Final = Device(PARTS[1], PARTS[1], GPUS[1], "1:0", 1)


def test_no_mig_device_is_given_whose_gpu_is_just_being_cut() -> None:
    name = f"{GPUS[2].lower()}-mig-1g10gb-19-2"
    making = ClaimDevice("gpu", "node-1", name, name, GPUS[2])
    with pytest.raises(DeviceTaken):
        refuse_claimed([MIG], [making])
    refuse_claimed([OTHER], [making])
    # What is there stays healthy: who has it is not to be told that it is gone.
    resource = Resource("nvidia.com/mig-1g.10gb", (MIG, OTHER))
    assert without_claimed(resource, [making]) is resource
    # Once it is made it is known which one it is.
    made = ClaimDevice("gpu", "node-1", name, "MIG-of-the-claim", GPUS[2])
    refuse_claimed([MIG, OTHER], [made])
