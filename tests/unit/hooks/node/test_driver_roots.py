"""Where a driver is found when nobody says where it is; each way to install one, by hand."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hooks.errors import DriverMismatch, DriverNotFound
from hooks.node.capabilities import Program
from hooks.node.driver import Driver, find_driver, places
from hooks.node.driver_layouts import LAYOUTS, LOADER, layout_named, prefix
from hooks.node.inventory import load_inventory, take_inventory
from hooks.node.witness import Witness
from tests.unit.hooks.fake_node import MULTIARCH, VERSION, Node

OTHER = "550.54.14"
CONTAINER = "run/nvidia/driver"


@pytest.fixture
def host(bare_node: Node) -> Node:
    """A node whose driver has to be found; its directory ``driver`` is the host's root."""
    bare_node.add_kernel()
    bare_node.config = replace(bare_node.config, driver_root=None, host_root=str(bare_node.driver))
    return bare_node


def found(node: Node) -> Driver:
    return find_driver(Witness("/"), node.config)


def library(driver: Driver) -> str:
    (source,) = (file.source for file in driver.libraries if file.row == "libcuda.so.{v}")
    return source


# Where each way to install the driver has its libraries and its programs.
PLACES = {
    "distribution": [
        (MULTIARCH, "usr/bin"),
        (f"{MULTIARCH}/nvidia/current", "usr/lib/nvidia/current"),
        (f"{MULTIARCH}/nvidia/tesla-470", "usr/lib/nvidia/tesla-470"),
        ("usr/lib64", "usr/sbin"),
    ],
    "google": [
        ("usr/local/nvidia/lib64", "usr/local/nvidia/bin"),
        ("home/kubernetes/bin/nvidia/lib64", "home/kubernetes/bin/nvidia/bin"),
    ],
    "opt": [
        ("opt/nvidia/current/usr/lib64", "opt/nvidia/current/usr/bin"),
        ("opt/nvidia/lib64", "opt/nvidia/bin"),
    ],
    "nixos": [("run/opengl-driver/lib", "run/current-system/sw/bin")],
    "talos": [("usr/local/glibc/usr/lib", "usr/local/bin")],
    "bottlerocket": [
        ("usr/lib/nvidia/tesla", "usr/libexec/nvidia/tesla/bin"),
        (
            "x86_64-bottlerocket-linux-gnu/sys-root/usr/lib/nvidia/tesla",
            "x86_64-bottlerocket-linux-gnu/sys-root/usr/libexec/nvidia/tesla/bin",
        ),
    ],
}  # fmt: skip


def test_every_layout_of_the_table_is_tried_here() -> None:
    assert set(PLACES) == {layout.name for layout in LAYOUTS}


@pytest.mark.parametrize(
    ("layout", "libraries", "programs"),
    [(layout, *each) for layout, several in PLACES.items() for each in several],
)
def test_driver_is_found_by_looking(host: Node, layout: str, libraries: str, programs: str) -> None:
    host.add_driver(directory=libraries)
    smi = host.write(host.driver / programs / "nvidia-smi", "x")
    driver = found(host)
    assert (driver.layout, driver.root) == (layout, str(host.driver))
    assert library(driver) == f"{host.driver}/{libraries}/libcuda.so.{VERSION}"
    assert [file.source for file in driver.files] == [str(smi)]
    assert "found by looking" in driver.why
    assert VERSION in driver.why


def test_all_of_google_s_driver_is_below_its_directory(host: Node) -> None:
    home = host.driver / "usr/local/nvidia"
    host.add_driver(directory="usr/local/nvidia/lib64")
    wanted = {
        host.write(home / path, "x")
        for path in (
            "bin/nvidia-smi",
            f"firmware/nvidia/{VERSION}/gsp_ga10x.bin",
            "vulkan/icd.d/nvidia_icd.json",
            "share/glvnd/egl_vendor.d/10_nvidia.json",
        )
    }
    assert {file.source for file in found(host).files} == set(map(str, wanted))


def test_links_of_nixos_lead_out_of_the_directory_to_real_files(host: Node) -> None:
    store = f"nix/store/0c4v-nvidia-x11-{VERSION}"
    host.add_driver(directory=f"{store}/lib")
    for name in os.listdir(host.driver / store / "lib"):
        link = host.driver / "run/opengl-driver/lib" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"/{store}/lib/{name}")
    host.write(host.driver / f"{store}-bin/bin/nvidia-smi", "patched")
    real = host.write(host.driver / f"{store}-bin/origBin/nvidia-smi", "as NVIDIA built it")
    host.write(host.driver / f"{store}-bin/bin/nvidia-debugdump", "has no other")
    programs = host.driver / "run/current-system/sw/bin"
    programs.mkdir(parents=True)
    for name in ("nvidia-smi", "nvidia-debugdump"):
        (programs / name).symlink_to(f"/{store}-bin/bin/{name}")
    driver = found(host)
    assert driver.layout == "nixos"
    assert library(driver) == f"{host.driver}/{store}/lib/libcuda.so.{VERSION}"
    assert {file.name: file.source for file in driver.files} == {
        "nvidia-smi": str(real),
        "nvidia-debugdump": f"{host.driver}/{store}-bin/bin/nvidia-debugdump",
    }


def test_driver_container_is_a_root_of_its_own(host: Node) -> None:
    host.add_driver(directory=f"{CONTAINER}/{MULTIARCH}/nvidia/current")
    # Absolute in the container: on the host it would lead elsewhere.
    (host.driver / CONTAINER / "etc/alternatives").mkdir(parents=True)
    real = host.write(host.driver / CONTAINER / "usr/lib/nvidia/current/nvidia-smi", "x")
    (host.driver / CONTAINER / "etc/alternatives/smi").symlink_to(
        "/usr/lib/nvidia/current/nvidia-smi"
    )
    (host.driver / CONTAINER / "usr/bin").mkdir()
    (host.driver / CONTAINER / "usr/bin/nvidia-smi").symlink_to("/etc/alternatives/smi")
    driver = found(host)
    assert (driver.layout, driver.root) == ("distribution", f"{host.driver}/{CONTAINER}")
    assert [file.source for file in driver.files] == [str(real)]


def test_sockets_are_those_of_the_root_that_was_found(host: Node) -> None:
    host.add_driver(directory=f"{CONTAINER}/{MULTIARCH}")
    (host.driver / CONTAINER / "tmp/nvidia-mps").mkdir(parents=True)
    (host.driver / "tmp/nvidia-mps").mkdir(parents=True)
    assert take_inventory(host.config, None).sockets == {
        "/tmp/nvidia-mps": f"{host.driver}/{CONTAINER}/tmp/nvidia-mps"
    }


@pytest.mark.parametrize(
    "places",
    [
        {MULTIARCH: OTHER, f"{CONTAINER}/{MULTIARCH}": VERSION},
        {MULTIARCH: OTHER, "usr/local/nvidia/lib64": VERSION},
        {f"{CONTAINER}/{MULTIARCH}": OTHER, "opt/nvidia/lib64": VERSION},
    ],
)
def test_the_root_of_the_module_s_version_wins(host: Node, places: dict[str, str]) -> None:
    for directory, version in places.items():
        host.add_driver(version, directory)
    driver = found(host)
    ours = next(directory for directory, version in places.items() if version == VERSION)
    assert library(driver) == f"{host.driver}/{ours}/libcuda.so.{VERSION}"
    assert f"not {OTHER} below" in driver.why


def test_of_several_with_the_version_the_host_s_own_wins(host: Node) -> None:
    host.add_driver(directory="usr/local/nvidia/lib64")
    host.add_driver(directory=f"{CONTAINER}/{MULTIARCH}")
    assert found(host).root == f"{host.driver}/{CONTAINER}"
    host.add_driver()
    assert (found(host).root, found(host).layout) == (str(host.driver), "distribution")


def test_without_a_module_the_first_root_counts_and_its_newest(host: Node) -> None:
    (host.proc / "driver/nvidia/version").unlink()
    host.add_driver("560.35.03", f"{CONTAINER}/{MULTIARCH}")
    assert found(host).version == "560.35.03"
    host.add_driver(VERSION)
    host.add_driver(OTHER)
    assert (found(host).version, found(host).root) == (OTHER, str(host.driver))


def test_mismatch_names_every_place(host: Node) -> None:
    host.add_driver(OTHER)
    host.add_driver("560.35.03", f"{CONTAINER}/{MULTIARCH}")
    with pytest.raises(DriverMismatch) as caught:
        found(host)
    assert f"{OTHER} below {host.driver} (distribution)" in caught.value.found
    assert f"560.35.03 below {host.driver}/{CONTAINER}" in caught.value.found
    assert "\n" not in str(caught.value)


def test_nothing_anywhere_is_said_with_both_roots(host: Node) -> None:
    with pytest.raises(DriverNotFound) as caught:
        found(host)
    assert f"{host.driver}/{CONTAINER}" in caught.value.found


def owned_by_another(path: Path) -> None:
    os.chown(path, 1000, 1000)


def writable_by_others(path: Path) -> None:
    path.chmod(0o777)


def writable_by_a_group_of_users(path: Path) -> None:
    os.chown(path, 0, 1000)
    path.chmod(0o775)


@pytest.mark.parametrize(
    "spoil", [owned_by_another, writable_by_others, writable_by_a_group_of_users]
)
@pytest.mark.parametrize("place", ["", "bin", "bin/nvidia/lib64"])
def test_driver_that_anybody_could_have_put_there_is_none(
    host: Node, spoil: Callable[[Path], None], place: str
) -> None:
    host.add_driver(directory="home/kubernetes/bin/nvidia/lib64")
    assert found(host).layout == "google"
    spoil(host.driver / "home/kubernetes" / place)
    with pytest.raises(DriverNotFound, match="not root's alone"):
        found(host)
    host.config = replace(host.config, driver_root=f"{host.driver}/home/kubernetes/bin/nvidia")
    assert VERSION in found(host).why, "whoever configures it means it"


def test_directory_of_a_system_group_is_as_good_as_root_s(host: Node) -> None:
    host.add_driver(directory="usr/local/nvidia/lib64")
    os.chown(host.driver / "usr/local", 0, 50)
    (host.driver / "usr/local").chmod(0o2775)
    assert found(host).layout == "google"


def in_loader_cache(host: Node, directory: str) -> None:
    host.write(host.driver / "etc/ld.so.conf", f"{directory}\n")
    subprocess.run(["/sbin/ldconfig", "-X", "-r", str(host.driver)], check=True)
    (host.driver / "etc/ld.so.conf").unlink()


def in_drop_in(host: Node, directory: str) -> None:
    host.write(host.driver / "etc/ld.so.conf.d/nvidia.conf", f"# ours\n{directory} # here\n")


@pytest.mark.parametrize("told", [in_loader_cache, in_drop_in])
def test_directories_that_no_table_has_are_those_of_the_loader(
    host: Node, told: Callable[[Node, str], None]
) -> None:
    host.add_driver(directory="srv/vendor/driver")
    (host.driver / "srv/vendor/driver/libcuda.so.1").symlink_to(f"libcuda.so.{VERSION}")
    told(host, "/srv/vendor/driver")
    driver = found(host)
    assert driver.layout == "loader"
    assert library(driver) == f"{host.driver}/srv/vendor/driver/libcuda.so.{VERSION}"


@pytest.mark.parametrize("damage", [b"", b"garbage", b"glibc-ld.so.cache1.1" + b"\xff" * 40])
def test_loader_cache_that_is_none_is_passed_over(host: Node, damage: bytes) -> None:
    (host.driver / "etc").mkdir()
    (host.driver / "etc/ld.so.cache").write_bytes(damage)
    os.mkfifo(host.driver / "etc/ld.so.conf")
    with pytest.raises(DriverNotFound):
        found(host)


def test_configured_directory_may_hold_the_driver_itself(host: Node) -> None:
    host.add_driver(directory="srv/nvidia/lib64")
    smi = host.write(host.driver / "srv/nvidia/bin/nvidia-smi", "x")
    host.config = replace(host.config, driver_root=f"{host.driver}/srv/nvidia")
    driver = found(host)
    assert library(driver) == f"{host.driver}/srv/nvidia/lib64/libcuda.so.{VERSION}"
    assert [file.source for file in driver.files] == [str(smi)]
    assert "configured" in driver.why


def test_links_of_a_configured_directory_may_be_the_host_s(host: Node) -> None:
    host.add_driver(directory="nix/store/x/lib")
    (host.driver / "srv").mkdir()
    (host.driver / "srv/lib").symlink_to("/nix/store/x/lib")
    host.config = replace(host.config, driver_root=f"{host.driver}/srv")
    driver = found(host)
    assert library(driver) == f"{host.driver}/nix/store/x/lib/libcuda.so.{VERSION}"
    assert (driver.root, driver.layout) == (str(host.driver), "prefix /srv")
    assert next(iter(places(Program("nvidia-smi"), driver))) == "/srv/bin/nvidia-smi"


def test_configured_root_is_the_only_one(host: Node) -> None:
    host.add_driver()
    host.config = replace(host.config, driver_root=f"{host.driver}/{CONTAINER}")
    with pytest.raises(DriverNotFound, match=CONTAINER):
        found(host)


def test_configured_root_may_have_any_layout(host: Node) -> None:
    host.add_driver(directory=f"{CONTAINER}/usr/local/nvidia/lib64")
    host.config = replace(host.config, driver_root=f"{host.driver}/{CONTAINER}")
    assert found(host).layout == "google"


def test_driver_in_a_better_place_makes_the_inventory_stale(host: Node) -> None:
    host.add_driver(directory="usr/local/nvidia/lib64")
    taken = take_inventory(host.config, None)
    assert load_inventory(host.config) == taken
    host.add_driver(directory=f"{CONTAINER}/{MULTIARCH}")
    assert load_inventory(host.config) is None
    assert take_inventory(host.config, None).driver.root == f"{host.driver}/{CONTAINER}"


def test_driver_container_that_goes_makes_the_inventory_stale(host: Node) -> None:
    host.add_driver(directory=f"{CONTAINER}/{MULTIARCH}")
    host.add_driver(directory="usr/local/nvidia/lib64")
    take_inventory(host.config, None)
    (host.driver / CONTAINER).rename(host.driver / "run/gone")
    assert load_inventory(host.config) is None
    assert take_inventory(host.config, None).driver.layout == "google"


def test_drop_in_that_changes_makes_the_inventory_stale(host: Node) -> None:
    host.add_driver(directory="srv/vendor/driver")
    in_drop_in(host, "/srv/vendor/driver")
    take_inventory(host.config, None)
    assert load_inventory(host.config) is not None
    in_drop_in(host, "/srv/nowhere")
    assert load_inventory(host.config) is None


@pytest.mark.parametrize("layout", [*LAYOUTS, LOADER, prefix("/srv/x"), prefix("")])
def test_layout_is_known_by_its_name(layout: Any) -> None:
    assert layout_named(layout.name) == layout
