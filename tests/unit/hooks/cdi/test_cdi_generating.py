"""NVIDIA's devices as a CDI spec without hooks."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from api.errors import NvshimError
from hooks.cdi import generating, schema
from hooks.cdi.errors import CdiNotGenerated, CdiSpecInvalid
from hooks.cdi.generating import Wish, generate
from hooks.cdi.spec import SpecDevice, SpecFile
from hooks.errors import MalformedDevice, NoGpus, UnknownDevice
from hooks.node.inventory import Inventory
from hooks.words import Capability
from tests.unit.hooks.fake_node import CAPS, VERSION, Node, nvml_gpu, nvml_mig, uuid_of

HOMES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64")


@pytest.fixture
def inventory(node: Node) -> Inventory:
    """GPU 0 with DRM nodes, GPU 1 in MIG mode with one device."""
    node.add_mig(1, 1, 0, (12, 13))
    node.add_gpu(2, "0000:00:01.0", drm=True)
    return node.take_inventory(
        nvml_gpu(2, "0000:00:01.0", index=0),
        nvml_gpu(0, index=1),
        nvml_gpu(1, index=2, mig=True, mig_devices=[nvml_mig(0, 1, 0)]),
    )


def made(node: Node, inventory: Inventory, **wish: Any) -> SpecFile:
    return generate(Wish(**wish), inventory, node.config)


def paths(device: SpecDevice) -> list[str]:
    return [node.path for node in device.edits.device_nodes]


def test_devices_have_an_index_and_a_uuid_and_all_has_all(node: Node, inventory: Inventory) -> None:
    spec = made(node, inventory)
    devices = {device.name: device for device in spec.devices}
    mig = inventory.mig_devices[0].uuid
    assert list(devices) == ["0", uuid_of(2), "1", uuid_of(0), "2:0", mig, "all"]
    assert paths(devices["0"]) == ["/dev/nvidia2", "/dev/dri/card2", "/dev/dri/renderD130"]
    assert devices["0"].edits == devices[uuid_of(2)].edits
    assert devices["0"].edits.additional_gids == (44,)
    caps = [f"/dev/nvidia-caps/nvidia-cap{n}" for n in (12, 13)]
    assert paths(devices["2:0"]) == ["/dev/nvidia1", *caps]
    assert devices["2:0"].edits.device_nodes[1].major == CAPS
    assert devices["2:0"].edits.additional_gids == ()
    assert set(paths(devices["all"])) == {
        path for name in ("0", "1", "2:0") for path in paths(devices[name])
    }
    common = [each.path for each in spec.edits.device_nodes]
    assert common[0] == "/dev/nvidiactl"
    assert not set(common) & set(paths(devices["all"]))


@pytest.mark.parametrize(
    ("strategies", "names"),
    [
        (("index",), ["0", "1", "2:0", "all"]),
        (("type-index",), ["gpu0", "gpu1", "mig2:0", "all"]),
        (("type-index", "index"), ["gpu0", "0", "gpu1", "1", "mig2:0", "2:0", "all"]),
    ],
)
def test_strategies_of_names(
    node: Node, inventory: Inventory, strategies: tuple[str, ...], names: list[str]
) -> None:
    spec = made(node, inventory, strategies=strategies)
    assert [device.name for device in spec.devices] == names


def test_libraries_are_mounted_by_all_their_names_where_loaders_search(
    node: Node, inventory: Inventory
) -> None:
    spec = made(node, inventory, capabilities=frozenset({Capability.COMPUTE}))
    mounted = {mount.container_path: mount.host_path for mount in spec.edits.mounts}
    source = f"{node.driver}/usr/lib/x86_64-linux-gnu/libcuda.so.{VERSION}"
    for home in HOMES:
        for name in (f"libcuda.so.{VERSION}", "libcuda.so.1", "libcuda.so"):
            assert mounted[f"{home}/{name}"] == source
    assert f"NVIDIA_CTK_LIBCUDA_DIR={':'.join(HOMES)}" in spec.edits.env
    assert "NVIDIA_VISIBLE_DEVICES=void" in spec.edits.env
    assert all("ro" in mount.options for mount in spec.edits.mounts)
    one = made(node, inventory, directories=("/opt/nvidia/lib",))
    assert {os.path.dirname(m.container_path) for m in one.edits.mounts} == {"/opt/nvidia/lib"}


def test_there_is_no_hook_and_the_version_is_the_lowest(node: Node, inventory: Inventory) -> None:
    spec = made(node, inventory)
    assert "hooks" not in json.dumps(schema.to_tree(spec))
    assert spec.version == "0.7.0"  # additionalGids of the DRM nodes
    plain = made(node, inventory, capabilities=frozenset({Capability.COMPUTE}))
    assert plain.version == "0.5.0"  # a name that begins with a digit
    words = made(
        node, inventory, capabilities=frozenset({Capability.COMPUTE}), strategies=("type-index",)
    )
    assert words.version == "0.3.0"
    told = made(
        node,
        inventory,
        capabilities=frozenset({Capability.COMPUTE}),
        annotations=(("nvidia.com/driver", VERSION),),
    )
    assert told.version == "0.6.0"


def test_only_the_devices_that_are_named(node: Node, inventory: Inventory) -> None:
    mig = inventory.mig_devices[0].uuid
    spec = made(node, inventory, devices=("1", "2:0"))
    devices = {device.name: device for device in spec.devices}
    assert list(devices) == ["1", uuid_of(0), "2:0", mig, "all"]
    assert set(paths(devices["all"])) == {*paths(devices["1"]), *paths(devices["2:0"])}
    alone = made(node, inventory, devices=(uuid_of(0)[:12].upper(),), all_device=False)
    assert [device.name for device in alone.devices] == ["1", uuid_of(0)]
    assert made(node, inventory, devices=("all",)) == made(node, inventory)


@pytest.mark.parametrize(
    ("device", "error"),
    [
        ("7", UnknownDevice),
        ("what is this", MalformedDevice),
        ("none", CdiNotGenerated),
        ("nvidia.com/gds=all", CdiNotGenerated),
        ("vendor.example/x=0", CdiNotGenerated),
    ],
)
def test_device_that_cannot_be_described_is_an_error(
    node: Node, inventory: Inventory, device: str, error: type[NvshimError]
) -> None:
    with pytest.raises(error):
        made(node, inventory, devices=(device,))


def test_without_groups_an_older_reader_understands_it(node: Node, inventory: Inventory) -> None:
    spec = made(node, inventory, groups=False)
    assert spec.version == "0.5.0"
    assert "additionalGids" not in json.dumps(schema.to_tree(spec))


def test_wish_that_is_no_kind_is_an_error(node: Node, inventory: Inventory) -> None:
    for wish in ({"vendor": "a/b"}, {"class_": "-"}, {"annotations": (("a b", ""),)}):
        with pytest.raises(CdiSpecInvalid):
            made(node, inventory, **wish)


def test_node_without_gpus_has_no_spec(bare_node: Node) -> None:
    bare_node.add_kernel()
    bare_node.add_driver()
    with pytest.raises(NoGpus):
        made(bare_node, bare_node.take_inventory())


@pytest.mark.parametrize("kind", [k for k in generating.KINDS if k not in {"gpu", "management"}])
def test_what_the_node_has_not_is_no_spec(node: Node, inventory: Inventory, kind: str) -> None:
    with pytest.raises(CdiNotGenerated, match="the node has none of"):
        made(node, inventory, kind=kind)


def test_features_channels_and_management(node: Node) -> None:
    text = (node.proc / "devices").read_text()
    node.write(
        node.proc / "devices",
        text.replace("Block", "510 nvidia-fs\n511 nvidia-caps-imex-channels\n\nBlock", 1),
    )
    node.add_node("nvidia-fs0", 510, 0)
    for channel in (0, 7):
        node.add_node(f"nvidia-caps-imex-channels/channel{channel}", 511, channel)
    inventory = node.take_inventory(nvml_gpu(0), nvml_gpu(1))
    gds = made(node, inventory, kind="gds")
    assert (gds.kind, [d.name for d in gds.devices]) == ("nvidia.com/gds", ["all"])
    assert paths(gds.devices[0]) == ["/dev/nvidia-fs0"]
    imex = made(node, inventory, kind="imex-channel")
    assert {d.name: len(d.edits.device_nodes) for d in imex.devices} == {"0": 1, "7": 1, "all": 2}
    management = made(node, inventory, kind="management")
    assert management.kind == "management.nvidia.com/gpu"
    (every,) = management.devices
    assert {"/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"} <= set(paths(every))
    assert "/dev/nvidia-fs0" not in paths(every)
    assert f"{HOMES[1]}/libcuda.so.1" in {m.container_path for m in every.edits.mounts}
