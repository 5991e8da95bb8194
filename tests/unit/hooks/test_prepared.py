"""Decisions that are cached for all containers of an image: their key and their encoding."""

from __future__ import annotations

import marshal
from dataclasses import replace
from typing import Any

import pytest

from hooks import engine
from hooks.edits.compat import Compat
from hooks.image.layout import Layout, Libc, Loader
from hooks.image.placement import Placed
from hooks.node.inventory import Inventory
from hooks.plan import (
    CachedLibrary,
    Device,
    File,
    Link,
    LinkDirectory,
    Missing,
    Mount,
    Plan,
    ProcFile,
)
from hooks.prepared import Prepared, key_of
from hooks.words import Arch
from tests.unit.hooks.fake_node import Node, nvml_gpu

PREPARED = Prepared(
    layout=Layout(
        loaders=(Loader(Arch.X86_64, Libc.MUSL, "/lib", searched=False),),
        has_cache=True,
        covered=("/proc", "/dev"),
        fresh=frozenset({"/dev", "/run"}),
    ),
    compat=Compat(
        "/usr/local/cuda/compat", "newer", "590.1", (CachedLibrary("a.so", "/a.so", Arch.X86_64),)
    ),
    plan=Plan(
        devices=(Device("/dev/nvidia0", 195, 0, reason="GPU 0"),),
        mounts=(Mount("/d/a", "/a", reason="library"), Mount("/s", "/b", ("rw",), "socket")),
        environment=(("A", "b"),),
        additional_gids=(44,),
        links=(Link("/l", "a", "soname"),),
        libraries=(CachedLibrary("b.so", "/b.so", Arch.I386),),
        library_directories=("/lib",),
        first_directories=("/first",),
        missing=(Missing("c", ("/x", "/y")),),
        files=(File("/f", b"\xff\0", 0o600, "why"),),
        link_directories=(LinkDirectory("/dev/dri/by-path", (("n", "../t"),)),),
        proc_files=(ProcFile("/proc/driver/nvidia/params", b"p"),),
    ),
    placed=Placed(
        written=("/l",),
        omitted=("/o",),
        staged=(
            ("/real/f", File("/f", b"\xff\0", 0o600, "why")),
            ("/dev/dri/by-path", LinkDirectory("/dev/dri/by-path", (("n", "../t"),))),
        ),
        layered=(Mount("/d/c", "/c", reason="library"),),
    ),
)


def spec_with(*environment: str, **more: Any) -> dict[str, Any]:
    return {
        "process": {"env": list(environment), "user": {"uid": 0, "gid": 0}},
        "mounts": [{"destination": "/dev", "type": "tmpfs", "source": "tmpfs"}],
        "linux": {},
        **more,
    }


ALL = "NVIDIA_VISIBLE_DEVICES=all"


@pytest.fixture
def inventory(node: Node) -> Inventory:
    return node.take_inventory(nvml_gpu(0), nvml_gpu(1))


def key(node: Node, inventory: Inventory | None, spec: dict[str, Any]) -> bytes | None:
    return key_of(spec, engine.read_request(spec), inventory, node.config)


def test_what_is_kept_is_what_was_decided() -> None:
    assert Prepared.decode(PREPARED.encode()) == PREPARED


def test_what_is_damaged_is_not_believed() -> None:
    content = PREPARED.encode()
    values = marshal.loads(content)
    # A truncated entry is invalid, wherever it is cut off.
    assert all(Prepared.decode(content[:length]) is None for length in range(0, len(content), 7))
    assert Prepared.decode(marshal.dumps([values[0] + 1, *values[1:]])) is None
    assert Prepared.decode(marshal.dumps(values[:-1])) is None
    assert Prepared.decode(marshal.dumps(values[1])) is None
    assert Prepared.decode(marshal.dumps([])) is None
    assert Prepared.decode(b"\xff" * 100) is None


def test_same_request_on_the_same_node_has_the_same_key(node: Node, inventory: Inventory) -> None:
    again = engine.load_inventory(node.config)
    assert again is not None
    assert again.kept
    first = key(node, inventory, spec_with(ALL, "A=b"))
    assert first is not None
    # The key does not depend on other variables, or on what the host mounts.
    other = spec_with(ALL, "A=c", mounts=[*spec_with()["mounts"]], hostname="x")
    other["mounts"][0]["source"] = "elsewhere"
    assert key(node, again, other) == first


def test_whatever_files_depend_on_changes_the_key(node: Node, inventory: Inventory) -> None:
    mounts = spec_with()["mounts"]
    kinds = [
        key(node, inventory, spec)
        for spec in (
            spec_with(ALL),
            spec_with("NVIDIA_VISIBLE_DEVICES=0"),
            spec_with(ALL, "NVIDIA_DRIVER_CAPABILITIES=all"),
            spec_with(ALL, "LD_LIBRARY_PATH=/opt/lib"),
            spec_with(ALL, mounts=[]),
            spec_with(ALL, mounts=[{**mounts[0], "destination": "/usr/lib"}]),
            spec_with(ALL, mounts=[{**mounts[0], "type": "bind"}]),
            spec_with(ALL, mounts=[{**mounts[0], "options": ["ro"]}]),
            *(
                spec_with(ALL, mounts=[{**mounts[0], "type": "bind", "options": options}])
                for options in (["rbind"], ["rbind", "rshared"], ["rbind", "rprivate"])
            ),
        )
    ]
    kinds += [
        key(node, changed, spec_with(ALL))
        for changed in (
            node.take_inventory(nvml_gpu(0)),
            replace(inventory, gpus=(replace(inventory.gpus[0], drained="x"), *inventory.gpus[1:])),
            replace(inventory, drained="x"),
            replace(inventory, parameters="x"),
            replace(inventory, sockets={"/run/x": "/run/x"}),
            replace(inventory, nodes=replace(inventory.nodes, faults={"/dev/x": "absent"})),
        )
    ]
    request = engine.read_request(spec_with(ALL))
    kinds.append(key_of(spec_with(ALL), request, inventory, replace(node.config, dev="/x")))
    assert None not in kinds
    assert len(set(kinds)) == len(kinds)


@pytest.mark.parametrize(
    "spec",
    [
        spec_with("NVIDIA_VISIBLE_DEVICES=void"),
        spec_with(ALL, "NVIDIA_GDS=enabled"),
        spec_with(ALL, "NVIDIA_IMEX_CHANNELS=0"),
        spec_with(ALL, "NVIDIA_IMEX_CHANNELS=all"),
        spec_with(ALL, "AMD_VISIBLE_DEVICES=all"),
        spec_with(ALL, "INTEL_VISIBLE_DEVICES=all"),
        spec_with(ALL, annotations={"cdi.k8s.io/x": "vendor.com/net=0"}),
        spec_with(ALL, linux={"uidMappings": [{"containerID": 0, "hostID": 9, "size": 1}]}),
    ],
    ids=["void", "feature", "channel", "channels", "amd", "intel", "cdi", "user namespace"],
)
def test_what_depends_on_more_has_no_key(
    node: Node, inventory: Inventory, spec: dict[str, Any]
) -> None:
    assert key(node, inventory, spec) is None


def test_without_an_inventory_there_is_no_key(node: Node) -> None:
    assert key(node, None, spec_with(ALL)) is None


def test_an_inventory_that_is_not_kept_has_no_key(node: Node, inventory: Inventory) -> None:
    # The next container takes a new inventory, so it would never find this entry.
    assert key(node, replace(inventory, id=""), spec_with(ALL)) is None
