"""How containers get their devices, depending on the CDI support that the engine reports."""

from __future__ import annotations

from typing import Final

import pytest

from integration.cri.engine import Engine
from integration.node.delivery import delivery_mode
from integration.node.values.resources import DeviceList, Settings

ANNOTATIONS, CRI = DeviceList.CDI_ANNOTATIONS, DeviceList.CDI_CRI
VARIABLE, MOUNTS = DeviceList.ENVVAR, DeviceList.VOLUME_MOUNTS
READS: Final = Engine("containerd", "2.1.9", {"enableCDI": True})
SILENT: Final = Engine("containerd", "2.1.9")
OLD: Final = Engine("containerd", "1.6.20", {"enableCDI": True})
OTHER: Final = Engine("another", "1.0")
HANDS_ON: Final = Engine(
    "containerd", "1.6.20",
    {"containerd": {"runtimes": {"nvidia": {
        "runtimeType": "io.containerd.nvidia.v1", "ContainerAnnotations": ["cdi.k8s.io/*"],
    }}}},
)  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "engine", "added", "why"),
    [
        ((CRI,), READS, (), ""),
        ((CRI,), Engine("cri-o", "1.30"), (), ""),
        ((CRI,), None, (VARIABLE,), "no engine says"),
        ((CRI,), SILENT, (VARIABLE,), "containerd 2.1.9 does not say"),
        ((CRI,), OTHER, (VARIABLE,), "another 1.0 does not say"),
        ((CRI,), OLD, (VARIABLE,), "containerd 1.6.20 does not read"),
        ((CRI,), HANDS_ON, (VARIABLE,), "does not read"),
        ((ANNOTATIONS,), HANDS_ON, (), ""),
        ((ANNOTATIONS,), OLD, (VARIABLE,), "does not read"),
        ((ANNOTATIONS,), READS, (), ""),
        # The shim gets the devices anyway.
        ((VARIABLE,), None, (), ""),
        ((MOUNTS, CRI), OLD, (), ""),
        ((ANNOTATIONS, CRI), HANDS_ON, (), ""),
    ],
)
def test_the_variable_is_added_where_the_engine_does_not_heed_what_is_asked_for(
    asked: tuple[DeviceList, ...], engine: Engine | None, added: tuple[DeviceList, ...], why: str
) -> None:
    told = delivery_mode(Settings(device_list_strategies=asked), engine)
    assert set(told.strategies) == {*asked, *added}
    assert why in told.why
    assert bool(told.why) == bool(why)


def test_annotations_of_another_prefix_are_not_handed_on() -> None:
    settings = Settings(device_list_strategies=(ANNOTATIONS,), cdi_annotation_prefix="x.example/")
    assert VARIABLE in delivery_mode(settings, HANDS_ON).strategies
