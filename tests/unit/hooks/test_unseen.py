"""An image that is not mounted yet: files are mounted from staging, and variables name them."""

from __future__ import annotations

import os
import stat
from typing import Any

import pytest

from hooks import engine
from hooks.image.rootfs_errors import RootfsReadOnly
from tests.harness.raising import raises
from tests.unit.hooks.fake_node import VERSION, Node, nvml_gpu
from tests.unit.hooks.test_engine import spec_with

HOME = "/dev/containerd-shim-nvidia/x86_64"


@pytest.fixture(autouse=True)
def _program(node: Node) -> None:
    (node.base / "driver/usr/bin").mkdir(parents=True, exist_ok=True)
    (node.base / "driver/usr/bin/nvidia-smi").write_bytes(b"a program")


def injected(node: Node, spec: dict[str, Any]) -> engine.Injection:
    return engine.inject(
        spec,
        engine.read_request(spec, node.config),
        node.take_inventory(nvml_gpu(0), nvml_gpu(1)),
        engine.UnseenTarget(str(node.base / "staging")),
        config=node.config,
    )


def variables(injection: engine.Injection) -> dict[str, str]:
    return dict(each.partition("=")[::2] for each in injection.spec["process"]["env"])


def test_libraries_are_on_a_tmpfs_with_their_links_and_found_by_the_variable(node: Node) -> None:
    before = spec_with("NVIDIA_VISIBLE_DEVICES=0", "LD_LIBRARY_PATH=/own:/usr/local/nvidia/lib64")
    injection = injected(node, before)
    mounts = {m["destination"]: m["source"] for m in injection.spec["mounts"][3:]}
    # The mount in which others have their mount points comes first.
    assert next(iter(mounts)) == HOME
    staged = mounts[HOME]
    assert stat.S_IMODE(os.stat(os.path.dirname(staged)).st_mode) & 0o077 == 0o055
    for link in ("libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1"):
        target = f"{HOME}/{os.path.realpath(f'{staged}/{link}').rpartition('/')[2]}"
        assert target.endswith(VERSION), link
        assert mounts[target].startswith(node.config.driver_root or ""), link
    assert mounts["/usr/bin/nvidia-smi"]
    assert variables(injection)["LD_LIBRARY_PATH"] == f"/own:/usr/local/nvidia/lib64:{HOME}"
    assert injection.record["image"]["writable"] is False
    assert injection.record["written"] == []


def test_a_volume_gets_no_mount_that_the_host_would_see(node: Node) -> None:
    spec = spec_with("NVIDIA_VISIBLE_DEVICES=0")
    shared = {"destination": "/usr/bin", "type": "bind", "source": "/x", "options": ["rshared"]}
    spec["mounts"].append({**shared, "options": ["rbind", "rshared"]})
    found = [mount["destination"] for mount in injected(node, spec).spec["mounts"]]
    assert "/usr/bin/nvidia-smi" not in found
    assert HOME in found


def test_with_a_shared_volume_no_mount_is_where_a_link_of_the_image_could_lead_it_there(
    node: Node,
) -> None:
    spec = spec_with("NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_DRIVER_CAPABILITIES=all")
    before = len(spec["mounts"])
    apart = [m["destination"] for m in injected(node, spec).spec["mounts"][before:]]
    volume = {"type": "bind", "source": "/x", "options": ["rbind", "rshared"]}
    spec["mounts"].append({**volume, "destination": "/volume"})
    injection = injected(node, spec)
    found = [m["destination"] for m in injection.spec["mounts"][before + 1 :]]
    home = HOME.rpartition("/")[0]
    assert not all(each.startswith(f"{home}/") for each in apart)
    assert all(each.startswith(f"{home}/") for each in found)
    (program,) = (each for each in found if each.endswith("/nvidia-smi"))
    assert variables(injection)["PATH"].endswith(f":{os.path.dirname(program)}")


def test_a_volume_gets_no_libraries(node: Node) -> None:
    spec = spec_with("NVIDIA_VISIBLE_DEVICES=0")
    volume = {"type": "bind", "source": "/x", "options": ["rbind", "rshared"]}
    spec["mounts"].append({**volume, "destination": f"{HOME}/libcuda.so.1"})
    found = [mount["destination"] for mount in injected(node, spec).spec["mounts"][4:]]
    assert HOME.replace("/dev", "/run") in found
    assert not [each for each in found if each.startswith(HOME)]


def test_without_a_tmpfs_there_is_no_place_for_libraries(node: Node) -> None:
    spec = spec_with("NVIDIA_VISIBLE_DEVICES=0")
    host = {"type": "bind", "source": "/dev", "options": ["rbind"]}
    spec["mounts"] = [{"destination": place, **host} for place in ("/dev", "/run")]
    with raises(RootfsReadOnly) as refused:
        injected(node, spec)
    assert "not mounted yet" in str(refused.value)
    assert not os.path.exists(node.base / "staging")


@pytest.mark.parametrize("name", ["/run", "/dev"])
def test_what_covers_a_tmpfs_counts(node: Node, name: str) -> None:
    spec = spec_with("NVIDIA_VISIBLE_DEVICES=0")
    volume = {"destination": "/dev", "type": "bind", "source": "/x", "options": ["rbind"]}
    spec["mounts"] += [volume] if name == "/run" else []
    path = variables(injected(node, spec))["LD_LIBRARY_PATH"]
    assert path == f"{name}/containerd-shim-nvidia/x86_64"
