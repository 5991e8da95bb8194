"""Finding the driver and its files, for each way to install one.

``drivers.json`` has for each case the driver that is found, or the error.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from api.errors import NvshimError
from hooks.node.capabilities import Program
from hooks.node.driver import Driver, find_driver, find_sockets, places
from hooks.node.driver_layouts import LAYOUTS, LOADER, layout_named, prefix
from hooks.node.fingerprint import Fingerprint
from hooks.node.inventory import load_inventory, take_inventory
from integration.simulated.driver import DriverFiles
from tests.unit.hooks.fake_node import MULTIARCH, VERSION, Node
from tests.unit.hooks.golden import Golden
from tests.unit.hooks.image.images import Make, fill, to

OTHER, NEWEST = "550.54.14", "560.35.03"
CONTAINER = "run/nvidia/driver"
GOOGLE = "usr/local/nvidia/lib64"
OURS = {MULTIARCH: (VERSION,)}


@pytest.fixture
def host(bare_node: Node) -> Node:
    """Make a node whose driver has to be found; its directory ``driver`` is the host's root."""
    bare_node.add_kernel()
    bare_node.config = replace(bare_node.config, driver_root=None, host_root=str(bare_node.driver))
    return bare_node


def found(node: Node) -> Driver:
    return find_driver(Fingerprint("/"), node.config)


# The directories of libraries and programs for each way to install the driver.
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


X = b"x"


@dataclass(frozen=True)
class Case:
    """A host's root: the directories with driver versions in them, and other files."""

    drivers: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: OURS)
    files: Mapping[str, Make] = field(default_factory=dict)
    module: str = VERSION  # "": none is loaded
    banner: str = ""  # replaces the module's
    narrow: str = ""  # the directory of a 32-bit libcuda
    configured: str | None = None  # the configured root, below the host's


def given(uid: int, gid: int, mode: int) -> Make:
    """Return a function that changes the owner and mode of an existing file."""

    def make(path: str) -> None:
        os.chown(path, uid, gid)
        os.chmod(path, mode)

    return make


def in_loader_cache(path: str) -> None:
    """Make a loader cache that lists a directory, and remove the configuration that named it."""
    root = path.removesuffix("/etc/ld.so.cache")
    fill(root, {"/etc/ld.so.conf": b"/srv/vendor/driver\n"})
    subprocess.run(["/sbin/ldconfig", "-X", "-r", root], check=True)
    os.unlink(f"{root}/etc/ld.so.conf")


def named_soname(path: str) -> None:
    os.symlink(f"libcuda.so.{VERSION}", path)


STORE = f"nix/store/0c4v-nvidia-x11-{VERSION}"
VENDOR = {"srv/vendor/driver": (VERSION,)}
FOUND = "home/kubernetes/bin/nvidia/lib64"
SPOILT = {
    "is another's": given(1000, 1000, 0o755),
    "others may write": given(0, 0, 0o777),
    "a group of users may write": given(0, 1000, 0o775),
}
BANNER = "NVRM version: NVIDIA UNIX"
VERSIONS = {MULTIARCH: (NEWEST, "580.65", OTHER)}
CASES: dict[str, Case] = {
    **{
        f"{layout}: {libraries}": Case({libraries: (VERSION,)}, {f"/{programs}/nvidia-smi": X})
        for layout, several in PLACES.items()
        for libraries, programs in several
    },
    **{f"in {directory}": Case({directory: (VERSION,)}) for directory in ("lib64", "usr/lib")},
    "all of Google's": Case(
        {GOOGLE: (VERSION,)},
        {
            f"/usr/local/nvidia/{path}": X
            for path in (
                "bin/nvidia-smi", f"firmware/nvidia/{VERSION}/gsp_ga10x.bin",
                "vulkan/icd.d/nvidia_icd.json", "share/glvnd/egl_vendor.d/10_nvidia.json",
                "etc/OpenCL/vendors/nvidia.icd",
            )
        },
    ),
    # Links lead out of the directory to real files and to NVIDIA's programs.
    "NixOS": Case(
        {f"{STORE}/lib": (VERSION,)},
        {
            **{
                f"/run/opengl-driver/lib/{name}": to(f"/{STORE}/lib/{name}")
                for name in (f"libcuda.so.{VERSION}", f"libnvidia-ml.so.{VERSION}")
            },
            f"/{STORE}-bin/bin/nvidia-smi": b"patched",
            f"/{STORE}-bin/origBin/nvidia-smi": b"as NVIDIA built it",
            f"/{STORE}-bin/bin/nvidia-debugdump": b"has no other",
            **{
                f"/run/current-system/sw/bin/{name}": to(f"/{STORE}-bin/bin/{name}")
                for name in ("nvidia-smi", "nvidia-debugdump")
            },
        },
    ),
    # Absolute in the container: on the host the link would lead elsewhere.
    "driver container": Case(
        {f"{CONTAINER}/{MULTIARCH}/nvidia/current": (VERSION,)},
        {
            f"/{CONTAINER}/usr/lib/nvidia/current/nvidia-smi": X,
            f"/{CONTAINER}/etc/alternatives/smi": to("/usr/lib/nvidia/current/nvidia-smi"),
            f"/{CONTAINER}/usr/bin/nvidia-smi": to("/etc/alternatives/smi"),
            f"/{CONTAINER}/usr/bin/nvidia-debugdump": to("/etc/hostname"),
        },
    ),
    "programs, configuration, firmware and modules": Case(
        OURS,
        dict.fromkeys(
            (
                "/usr/bin/nvidia-smi", "/usr/sbin/nvidia-cuda-mps-server", "/usr/bin/bash",
                "/usr/lib/nvidia/current/nvidia-debugdump", "/etc/vulkan/icd.d/nvidia_icd.json",
                "/usr/share/glvnd/egl_vendor.d/10_nvidia.json", "/etc/OpenCL/vendors/nvidia.icd",
                f"/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin",
                f"/lib/firmware/nvidia/{VERSION}/gsp_tu10x.bin",
                "/lib/firmware/nvidia/470.1.1/gsp.bin",
                "/usr/lib/xorg/modules/drivers/nvidia_drv.so",
                f"/usr/lib/xorg/modules/extensions/libglxserver_nvidia.so.{VERSION}",
            ),
            X,
        ),
    ),
    "Xorg's modules as on Fedora": Case(
        {"usr/lib64": (VERSION,)}, {"/usr/lib64/xorg/modules/drivers/nvidia_drv.so": X}
    ),
    "the module's version in a container": Case(
        {MULTIARCH: (OTHER,), f"{CONTAINER}/{MULTIARCH}": (VERSION,)}
    ),
    "the module's version at Google's place": Case({MULTIARCH: (OTHER,), GOOGLE: (VERSION,)}),
    "the module's version in opt": Case(
        {f"{CONTAINER}/{MULTIARCH}": (OTHER,), "opt/nvidia/lib64": (VERSION,)}
    ),
    "the module's version beside another": Case({MULTIARCH: (VERSION, OTHER)}),
    "another module's version beside it": Case({MULTIARCH: (VERSION, OTHER)}, module=OTHER),
    "a container's before Google's place": Case(
        {GOOGLE: (VERSION,), f"{CONTAINER}/{MULTIARCH}": (VERSION,)}
    ),
    "the host's own first": Case(
        {GOOGLE: (VERSION,), f"{CONTAINER}/{MULTIARCH}": (VERSION,), MULTIARCH: (VERSION,)}
    ),
    "no module, a container": Case({f"{CONTAINER}/{MULTIARCH}": (NEWEST,)}, module=""),
    "no module, the first root and its newest": Case(
        {f"{CONTAINER}/{MULTIARCH}": (NEWEST,), MULTIARCH: (VERSION, OTHER)}, module=""
    ),
    "no module, numbers by value": Case({MULTIARCH: ("535.9.1", "535.104.05")}, module=""),
    "open module": Case(VERSIONS, banner=f"{BANNER} Open Kernel Module for x86_64  {NEWEST}  Rel"),
    "module of two numbers": Case(VERSIONS, banner=f"{BANNER} x86_64 Kernel Module  580.65  Thu"),
    "no banner": Case(VERSIONS, banner="\n"),
    "banner of nonsense": Case(VERSIONS, banner="nonsense 1.8.1"),
    "mismatch": Case({MULTIARCH: (OTHER,), f"{CONTAINER}/{MULTIARCH}": (NEWEST,)}),
    "nothing": Case({}),
    "file of a library's name": Case(
        {}, {f"/{MULTIARCH}/libcuda.so.{VERSION}": b"not an ELF file"}
    ),
    **{
        f"32 bits in {directory}": Case(narrow=directory)
        for directory in ("usr/lib32", "usr/lib/i386-linux-gnu", "usr/lib")
    },
    "lib by two names": Case(OURS, {"/lib": to("usr/lib")}),
    # A driver in a directory that any user could write is ignored, unless the admin configured it.
    **{
        f"below /home/kubernetes/{place}, which {what}": Case(
            {FOUND: (VERSION,)}, {f"/home/kubernetes/{place}".rstrip("/"): spoil}
        )
        for place in ("", "bin", "bin/nvidia/lib64")
        for what, spoil in SPOILT.items()
    },
    **{
        f"configured, although it {what}": Case(
            {FOUND: (VERSION,)}, {f"/{FOUND}": spoil}, configured="/home/kubernetes/bin/nvidia"
        )
        for what, spoil in SPOILT.items()
    },
    "a system group may write": Case(
        {GOOGLE: (VERSION,)}, {"/usr/local": given(0, 50, 0o2775)}
    ),
    "in the loader's cache": Case(
        VENDOR,
        {"/srv/vendor/driver/libcuda.so.1": named_soname, "/etc/ld.so.cache": in_loader_cache},
    ),
    "in the loader's configuration": Case(
        VENDOR, {"/etc/ld.so.conf.d/nvidia.conf": b"# ours\n/srv/vendor/driver # here\n"}
    ),
    **{
        f"loader's cache of {len(damage)} bytes": Case(
            {}, {"/etc/ld.so.cache": damage, "/etc/ld.so.conf": os.mkfifo}
        )
        for damage in (b"", b"garbage", b"glibc-ld.so.cache1.1" + b"\xff" * 40)
    },
    "configured, with the driver itself": Case(
        {"srv/nvidia/lib64": (VERSION,)},
        {"/srv/nvidia/bin/nvidia-smi": X},
        configured="/srv/nvidia",
    ),
    "configured, with links of the host's": Case(
        {"nix/store/x/lib": (VERSION,)}, {"/srv/lib": to("/nix/store/x/lib")}, configured="/srv"
    ),
    "configured, and empty": Case(OURS, configured=f"/{CONTAINER}"),
    "configured, of any layout": Case(
        {f"{CONTAINER}/{GOOGLE}": (VERSION,)}, configured=f"/{CONTAINER}"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_driver_that_is_found(host: Node, name: str) -> None:
    case = CASES[name]
    (host.proc / "driver/nvidia/version").unlink()
    if case.module:
        host.add_kernel_version(case.module)
    if case.banner:
        host.write(host.proc / "driver/nvidia/version", case.banner)
        host.write(host.sys / "module/nvidia/version", f"{OTHER}\n")
    for directory, versions in case.drivers.items():
        for version in versions:
            host.add_driver(version, directory)
    if case.narrow:
        host.add_library(f"libcuda.so.{VERSION}", "libcuda.so.1", case.narrow, bits=32)
    fill(str(host.driver), case.files)
    if case.configured is not None:
        host.config = replace(host.config, driver_root=f"{host.driver}{case.configured}")
    shown = json.dumps(outcome(host)).replace(str(host.driver), "HOST")
    Golden("drivers.json").compare(name, json.loads(shown.replace(str(host.base), "NODE")))


def outcome(host: Node) -> dict[str, Any]:
    try:
        driver = found(host)
    except NvshimError as error:
        return {"error": str(error)}
    directories = driver.library_directories
    assert len(directories) == len(set(directories)), "none is searched twice"
    return {
        "version": driver.version,
        "architectures": [arch and arch.value for arch in (driver.arch, driver.arch32)],
        "layout": driver.layout,
        "root": driver.root,
        "why": driver.why,
        "libraries": [
            f"{lib.name} {lib.soname} {lib.arch.value}: {lib.source}" for lib in driver.libraries
        ],
        "files": sorted(file.source for file in driver.files),
        "sought first": next(iter(places(Program("nvidia-smi"), driver))),
    }


def test_sockets_are_those_of_the_root_that_was_found(host: Node) -> None:
    host.add_driver(directory=f"{CONTAINER}/{MULTIARCH}")
    (host.driver / CONTAINER / "tmp/nvidia-mps").mkdir(parents=True)
    (host.driver / "tmp/nvidia-mps").mkdir(parents=True)
    assert take_inventory(host.config, None).sockets == {
        "/tmp/nvidia-mps": f"{host.driver}/{CONTAINER}/tmp/nvidia-mps"
    }


def test_sockets_count_only_while_they_are_sockets(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = node.driver / "run/nvidia-persistenced/socket"
    node.write(place, "a file")
    assert find_sockets(str(node.driver)) == {}
    place.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(place.parent)  # the path is too long for a socket
        listener.bind("socket")
        assert find_sockets(str(node.driver)) == {"/run/nvidia-persistenced/socket": str(place)}
        assert find_sockets(str(node.driver), ("fabricmanager", "mps")) == {}


def test_directory_of_pipes_counts_only_if_root_made_it(node: Node) -> None:
    pipes = node.driver / "tmp/nvidia-mps"
    pipes.mkdir(parents=True)
    assert find_sockets(str(node.driver)) == {"/tmp/nvidia-mps": str(pipes)}
    os.chown(pipes, 1000, 1000)
    assert find_sockets(str(node.driver)) == {}
    pipes.rmdir()
    (node.driver / "tmp/evil").mkdir()
    os.chown(node.driver / "tmp/evil", 1000, 1000)
    pipes.symlink_to("evil")
    assert find_sockets(str(node.driver)) == {}


def test_firmware_that_goes_while_it_is_looked_at_is_none(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    firmware = node.write(node.driver / f"lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin", "x")
    listdir = os.listdir

    def removed(path: str) -> list[str]:
        if path == str(firmware.parent):
            raise FileNotFoundError(2, "No such file or directory", path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", removed)
    assert str(firmware) not in {file.source for file in found(node).files}


def test_longest_name_of_a_pattern_wins(node: Node) -> None:
    node.add_library("libnvidia-egl-gbm.so.1.1.0", "libnvidia-egl-gbm.so.1")
    (node.driver / MULTIARCH / "libnvidia-egl-gbm.so.1").symlink_to("libnvidia-egl-gbm.so.1.1.0")
    assert "libnvidia-egl-gbm.so.1.1.0" in {lib.name for lib in found(node).libraries}


def test_library_that_no_row_names_is_one_of_the_others(node: Node) -> None:
    for stem in ("libnvfuture", "libnvidia-gtk3", "libnvidia-ngx", "libglxserver_nvidia"):
        node.add_library(f"{stem}.so.{VERSION}", f"{stem}.so.1")
    node.add_library(f"libnvfuture.so.{VERSION}", "libnvfuture.so.1", "usr/lib64")
    node.add_library(f"libnvfuture.so.{VERSION}", "libnvfuture.so.1", "usr/lib32", bits=32)
    node.add_library("libnvother.so.1.2.3", "libnvother.so.1")
    (node.driver / MULTIARCH / f"libnvtext.so.{VERSION}").write_text("not a library")
    driver = found(node)
    assert driver.others == (f"libnvfuture.so.{VERSION}",)
    others = [(lib.arch.value, lib.source) for lib in driver.libraries if lib.name in driver.others]
    assert others == [
        ("x86_64", f"{node.driver}/{MULTIARCH}/libnvfuture.so.{VERSION}"),
        ("i386", f"{node.driver}/usr/lib32/libnvfuture.so.{VERSION}"),
    ]
    (note,) = driver.notes
    assert note.startswith(f"libnvfuture.so.{VERSION}: of no capability")


def test_manifest_is_read_as_its_name_says_and_not_as_the_file_that_it_leads_to(
    node: Node,
) -> None:
    place = node.driver / "etc/OpenCL/vendors/nvidia.icd"
    named = node.write(node.driver / "etc/alternatives/nvidia-opencl", "/x/libnvidia-opencl.so.1")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to("/etc/alternatives/nvidia-opencl")
    (file,) = (each for each in found(node).files if each.name == "nvidia.icd")
    assert (file.source, file.manifest) == (str(named), "/x/libnvidia-opencl.so.1")


def test_real_driver_has_what_cuda_and_nvidia_smi_need(bare_node: Node) -> None:
    config = replace(bare_node.config, driver_root=DriverFiles.fetch().directory)
    driver = find_driver(Fingerprint("/"), config)
    sonames = {lib.soname for lib in driver.libraries}
    assert {"libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1"} <= sonames
    assert "nvidia-smi" in {file.name for file in driver.files}


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


def drop_in(host: Node, directory: str) -> None:
    host.write(host.driver / "etc/ld.so.conf.d/nvidia.conf", f"{directory}\n")


def test_drop_in_that_changes_makes_the_inventory_stale(host: Node) -> None:
    host.add_driver(directory="srv/vendor/driver")
    drop_in(host, "/srv/vendor/driver")
    take_inventory(host.config, None)
    assert load_inventory(host.config) is not None
    drop_in(host, "/srv/nowhere")
    assert load_inventory(host.config) is None


@pytest.mark.parametrize("layout", [*LAYOUTS, LOADER, prefix("/srv/x"), prefix("")])
def test_layout_is_known_by_its_name(layout: Any) -> None:
    assert layout_named(layout.name) == layout
