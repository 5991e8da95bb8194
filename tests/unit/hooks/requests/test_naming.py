from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hooks.errors import MalformedChannel, MalformedDevice, RequestError, TooManyDevices
from hooks.requests.naming import parse_channels, parse_names
from hooks.words import (
    AllDevices,
    Feature,
    GpuBusId,
    GpuIndex,
    GpuUuid,
    MigIndex,
    MigInstance,
    MigUuid,
    NamedDevices,
    Names,
    NoDevices,
    Void,
    items_of,
)
from tests.harness.raising import raises

UUID = "8ef4a8d0-0123-4567-89ab-00decafc0ffe"
DIGITS = UUID.upper()


def parsed(value: str, **more: Any) -> Names:
    return parse_names(items_of(value), asked=value, **more)


def gpus(*names: Any) -> Names:
    return Names(NamedDevices(names))


NAMED: dict[str, Names] = {
    "": Names(Void()),
    " , ,": Names(Void()),
    "void": Names(Void()),
    "0,void": Names(Void()),
    "all,void": Names(Void()),
    "amd.com/gpu=0,void": Names(Void()),
    "none": Names(NoDevices()),
    "none,all": Names(NoDevices()),
    "all,none": Names(AllDevices()),
    "0,none": Names(NoDevices()),
    "all": Names(AllDevices()),
    " all ": Names(AllDevices()),
    "0,all": Names(AllDevices()),
    "all,nonsense": Names(AllDevices()),
    "0": gpus(GpuIndex(0)),
    "3,1": gpus(GpuIndex(3), GpuIndex(1)),
    "0,,1,": gpus(GpuIndex(0), GpuIndex(1)),
    "1,1, 1": gpus(GpuIndex(1)),
    "0-3,5": gpus(*map(GpuIndex, (0, 1, 2, 3, 5))),
    "2,0-3": gpus(*map(GpuIndex, (2, 0, 1, 3))),
    "4-4": gpus(GpuIndex(4)),
    "0-255": gpus(*map(GpuIndex, range(256))),
    "1:0": gpus(MigIndex(1, 0)),
    "07:00": gpus(MigIndex(7, 0)),
    f"GPU-{UUID}": gpus(GpuUuid(f"GPU-{UUID}")),
    f"gpu-{DIGITS}": gpus(GpuUuid(f"GPU-{UUID}")),
    "GPU-8EF4": gpus(GpuUuid("GPU-8ef4")),
    "GPU-8ef4a8d0-": gpus(GpuUuid("GPU-8ef4a8d0-")),
    "GPU-8ef4a8d0-01": gpus(GpuUuid("GPU-8ef4a8d0-01")),
    f"MIG-{DIGITS}": gpus(MigUuid(f"MIG-{UUID}")),
    "mig-8ef4": gpus(MigUuid("MIG-8ef4")),
    f"MIG-GPU-{UUID}/1/0": gpus(MigInstance(f"GPU-{UUID}", 1, 0)),
    f"mig-gpu-{DIGITS}/13/2": gpus(MigInstance(f"GPU-{UUID}", 13, 2)),
    "0000:07:00.0": gpus(GpuBusId("0000:07:00.0")),
    "00000000:07:00.0": gpus(GpuBusId("0000:07:00.0")),
    "07:00.0": gpus(GpuBusId("0000:07:00.0")),
    "0001:CA:1F.7": gpus(GpuBusId("0001:ca:1f.7")),
    "0001abcd:CA:00.0": gpus(GpuBusId("1abcd:ca:00.0")),
    f"0,mig-{UUID},GPU-{UUID},3:1": gpus(
        GpuIndex(0), MigUuid(f"MIG-{UUID}"), GpuUuid(f"GPU-{UUID}"), MigIndex(3, 1)
    ),
    "nvidia.com/gpu=0": gpus(GpuIndex(0)),
    "nvidia.com/gpu=0,1": gpus(GpuIndex(0), GpuIndex(1)),
    "nvidia.com/gpu=0,nvidia.com/gpu=1": gpus(GpuIndex(0), GpuIndex(1)),
    "nvidia.com/gpu=0,runtime.nvidia.com/gpu=0": gpus(GpuIndex(0)),
    "nvidia.com/gpu=0-1": gpus(GpuIndex(0), GpuIndex(1)),
    "nvidia.com/gpu=1:0": gpus(MigIndex(1, 0)),
    f"nvidia.com/gpu=GPU-{UUID}": gpus(GpuUuid(f"GPU-{UUID}")),
    "nvidia.com/gpu=gpu0,mig1:2": gpus(GpuIndex(0), MigIndex(1, 2)),
    "nvidia.com/gpu=all": Names(AllDevices()),
    "nvidia.com/gpu=0,all": Names(AllDevices()),
    "runtime.nvidia.com/gpu=none": Names(NoDevices()),
    "nvidia.com/gpu=mine": Names(Void(), cdi_devices=("nvidia.com/gpu=mine",)),
    "nvidia.com/gpu=mig0": Names(Void(), cdi_devices=("nvidia.com/gpu=mig0",)),
    "nvidia.com/gpu=gpu1:0": Names(Void(), cdi_devices=("nvidia.com/gpu=gpu1:0",)),
    "nvidia.com/pgpu=0": Names(Void(), cdi_devices=("nvidia.com/pgpu=0",)),
    "amd.com/gpu=0,1": Names(Void(), cdi_devices=("amd.com/gpu=0", "amd.com/gpu=1")),
    "amd.com/gpu=all": Names(Void(), cdi_devices=("amd.com/gpu=all",)),
    "0,amd.com/gpu=0,1": Names(
        NamedDevices((GpuIndex(0),)), cdi_devices=("amd.com/gpu=0", "amd.com/gpu=1")
    ),
    "none,amd.com/gpu=0": Names(NoDevices(), cdi_devices=("amd.com/gpu=0",)),
    "nvidia.com/gds=all": Names(Void(), frozenset({Feature.GDS})),
    "nvidia.com/gpu=0,nvidia.com/mofed=all,nvidia.com/nvswitch=all": Names(
        NamedDevices((GpuIndex(0),)), frozenset({Feature.MOFED, Feature.NVSWITCH})
    ),
    "nvidia.com/gdrcopy=all": Names(Void(), frozenset({Feature.GDRCOPY})),
    "nvidia.com/gds=0": Names(Void(), cdi_devices=("nvidia.com/gds=0",)),
    "management.nvidia.com/gpu=all": Names(Void(), frozenset({Feature.MANAGEMENT})),
    "nvidia.com/imex-channel=3,channel0": Names(Void(), imex_channels=(3, 0)),
    "nvidia.com/imex-channel=0,all": Names(Void(), imex_channels=None),
}


def test_list_names_and_a_kind_holds_for_what_follows_it() -> None:
    assert {value: parsed(value) for value in NAMED} == NAMED


def test_default_kind_is_that_of_names_without_one() -> None:
    names = parsed("0,nvidia.com/gpu=1,2", default_kind="amd.com/gpu")
    assert names == Names(NamedDevices((GpuIndex(1), GpuIndex(2))), cdi_devices=("amd.com/gpu=0",))
    assert parsed("none", default_kind="amd.com/gpu") == Names(NoDevices())


UNKNOWN = (
    "ALL", "-1", "1.0", "0x1", "²", "1234567", "1:", ":1", "1:2:3", "GPU", "GPU-", "GPU--",
    "3-1", "0-", "-0", "0-256", "0-1-2", "0-999999", "1:0-1",
    f"GPU-{UUID}0", f"GPU-{UUID[:-1]}g", "GPU-8ef4a8d00", f"TPU-{UUID}", UUID, "MIG-",
    f"MIG-GPU-{UUID}", f"MIG-GPU-{UUID}/1", f"MIG-GPU-{UUID}/1/0/0", "MIG-GPU-8ef4/1/0",
    "07:00.8", "07:20.0", "7:0.0", "000:07:00.0", "000000000:07:00.0", "0:0:07:00.0",
    "07:00.", "g7:00.0", "00.0", ".", "0 1", "gpu0", "mig0:1",
    "/var/run/nvidia-container-devices", "\x1b[31m", "\n1:",
    "=", "0=1", "nvidia.com/gpu=", "nvidia.com=0", "/gpu=0", "nvidia.com/=0", "a/b/c=0",
    "nvidia.com/gpu=0=1", "nvidia.com/gpu=-0", "nvidia.com/gpu=0 1", "1a.com/gpu=0",
    "nvidia.com/gpu=x/y", "runtime.nvidia.com/gpu=mine", "runtime.nvidia.com/gpu=gpu",
)  # fmt: skip


def test_item_of_no_known_form_is_named_in_the_error() -> None:
    for item in UNKNOWN:
        with raises(MalformedDevice, match="names no device") as caught:
            pytest.fail(f"{item!r} is {parsed(f'0,{item}')}")
        assert "\n" not in str(caught.value), item


@pytest.mark.parametrize(
    "value",
    [
        ",".join(map(str, range(1025))),
        "0-255,1-255,00-255,01-255,000-255,001-255",
        ",".join(f"{256 * k}-{256 * k + 255}" for k in range(3000)),
        ",".join(f"amd.com/gpu={k}" for k in range(1025)),
        ",".join(f"nvidia.com/gpu=n{k}n" for k in range(1025)),
        "nvidia.com/imex-channel=" + ",".join(map(str, range(3000))),
    ],
)
def test_longer_list_than_any_node_has_is_an_error(value: str) -> None:
    with raises(TooManyDevices):
        parsed(value)


@pytest.mark.parametrize(
    ("value", "channels"),
    [
        ("", ()),
        ("0", (0,)),
        ("2,channel1,2", (2, 1)),
        ("1048575", (1048575,)),
        ("0,all", None),
    ],
)
def test_list_of_channels(value: str, channels: object) -> None:
    assert parse_channels(items_of(value), asked="x") == channels


@pytest.mark.parametrize("item", ["1048576", "-1", "channel", "channelchannel0", "none", "0-3"])
def test_what_is_no_channel_is_named_in_the_error(item: str) -> None:
    with raises(MalformedChannel, match=item):
        parse_channels(["0", item], asked="x")


@given(
    st.text(max_size=60)
    | st.text("0123:,-./=GPUMIGabcdef-noilvd ", max_size=60)
    | st.lists(
        st.sampled_from(
            ["nvidia.com/gpu=", "amd.com/gpu=", "GPU-", "MIG-", "0", "-", ":", ".", "/", ",", UUID]
        ),
        max_size=9,
    ).map("".join)
)
def test_every_string_is_a_list_of_names_or_one_typed_error(value: str) -> None:
    try:
        names = parsed(value)
    except RequestError:
        return
    if isinstance(names.devices, NamedDevices):
        assert names.devices.devices == tuple(dict.fromkeys(names.devices.devices))
        assert names.devices.devices
    else:
        assert isinstance(names.devices, Void | NoDevices | AllDevices)


DEVICE = st.one_of(
    st.integers(0, 999999).map(GpuIndex),
    st.builds(MigIndex, st.integers(0, 99), st.integers(0, 99)),
    st.uuids().map(lambda u: GpuUuid(f"GPU-{u}")),
    st.uuids().map(lambda u: MigUuid(f"MIG-{u}")),
    st.builds(
        MigInstance, st.uuids().map(lambda u: f"GPU-{u}"), st.integers(0, 99), st.integers(0, 99)
    ),
    st.builds(
        lambda domain, bus, slot: GpuBusId(f"{domain:04x}:{bus:02x}:{slot:02x}.0"),
        st.integers(0, 0xFFFFF),
        st.integers(0, 255),
        st.integers(0, 31),
    ),
)


@given(st.lists(DEVICE, min_size=1, unique=True, max_size=12))
def test_names_written_out_are_read_back(devices: list[Any]) -> None:
    assert parsed(",".join(map(str, devices))) == gpus(*devices)
    assert parsed(" ,".join(map(str, devices)).upper()) == gpus(*devices)
