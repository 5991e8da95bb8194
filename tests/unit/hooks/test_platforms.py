"""Which platform a node is; what a container gets on Tegra and in WSL2."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from api.values import changed
from hooks import platforms
from hooks.config import Config, Platform, load_config, parse_config
from hooks.edits.plan import Arch
from hooks.errors import NoGpus, UnknownDevice, WrongConfigValue
from hooks.image.layout import Layout, Libc, Loader
from hooks.nvidia_config import parse_nvidia_config
from hooks.platforms.csv_files import Entry, parse
from hooks.platforms.errors import (
    CsvFilesMissing,
    DriverStoreMissing,
    MigUnsupported,
    PlatformNodeMissing,
)
from hooks.platforms.tegra import wants_every_file
from hooks.requests.names import Void
from hooks.requests.naming import items_of, parse_names
from hooks.requests.policy_errors import GpuExcluded
from hooks.requests.request import Request, parse_capabilities
from integration.cli.app import main
from integration.simulated import Scenario, SimulatedNode
from integration.simulated.platforms import LISTS, STORE
from tests.unit.hooks.fake_node import uuid_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hooks.edits.plan import Contribution, Plan
    from tests.unit.hooks.fake_node import Node

    Copy = Callable[[SimulatedNode], SimulatedNode]

TRIPLET = f"{os.uname().machine}-linux-gnu"
OWN = f"/usr/lib/{TRIPLET}/nvidia"
HOME = f"/usr/lib/{TRIPLET}"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, SimulatedNode]]:
    """A node of each platform, made once and not to be changed."""
    top = tmp_path_factory.mktemp("platforms")
    made = {
        name: SimulatedNode.create(str(top / name), Scenario.parse({"platform": name}))
        for name in ("tegra", "wsl")
    }
    yield made
    for node in made.values():
        node.remove()


@pytest.fixture
def copied(tmp_path: Path) -> Iterator[Copy]:
    """A copy of a node, to be changed."""
    made = []

    def copy(node: SimulatedNode) -> SimulatedNode:
        directory = tmp_path / "copy"
        shutil.copytree(node.directory, directory, symlinks=True, copy_function=_copy)
        # shutil would read device nodes.
        path = directory / "config.toml"
        path.write_text(path.read_text().replace(node.directory, str(directory)))
        made.append(SimulatedNode.open(str(directory)))
        return made[-1]

    yield copy
    for node in made:
        node.remove()


def _copy(source: str, target: str) -> str:
    seen = os.lstat(source)
    if stat.S_ISCHR(seen.st_mode):
        os.mknod(target, seen.st_mode, seen.st_rdev)
        os.chmod(target, stat.S_IMODE(seen.st_mode))
        os.chown(target, seen.st_uid, seen.st_gid)
        return target
    if stat.S_ISREG(seen.st_mode) and seen.st_size > 1 << 16:
        os.link(source, target)  # a library, which nobody writes to
        return target
    return str(shutil.copy2(source, target, follow_symlinks=False))


@pytest.fixture
def tegra(pristine: dict[str, SimulatedNode], copied: Copy) -> SimulatedNode:
    return copied(pristine["tegra"])


@pytest.fixture
def wsl(pristine: dict[str, SimulatedNode], copied: Copy) -> SimulatedNode:
    return copied(pristine["wsl"])


def layout(*, writable: bool = True) -> Layout:
    arch = Arch(os.uname().machine)
    home = HOME if writable else f"/run/containerd-shim-nvidia/{arch.value}"
    return Layout(
        (Loader(arch, Libc.GLIBC, home, searched=writable),),
        writable=writable,
        scratch=None if writable else "/run",
    )


def config_of(node: SimulatedNode) -> Config:
    return load_config(node.config_path)


def given(
    config: Config,
    devices: str = "all",
    *,
    capabilities: str | None = "all",
    environment: tuple[str, ...] = (),
    image: Layout | None = None,
) -> Contribution:
    request = Request(
        parse_names(items_of(devices), asked=devices).devices,
        parse_capabilities(capabilities),
        source=f"NVIDIA_VISIBLE_DEVICES={devices}",
    )
    spec = {"process": {"env": list(environment)}}
    return platforms.contribute(spec, request, config, image or layout())


def devices(plan: Plan) -> set[str]:
    return {device.path for device in plan.devices}


def mounts(plan: Plan) -> dict[str, str]:
    return {mount.destination: mount.source for mount in plan.mounts}


def links(plan: Plan) -> dict[str, str]:
    return {link.path: link.target for link in plan.links}


# --- Which platform


def test_platform_is_found_by_what_is_there(
    tegra: SimulatedNode, pristine: dict[str, SimulatedNode], node: Node
) -> None:
    assert platforms.platform_of(config_of(tegra)) == Platform.TEGRA
    assert platforms.platform_of(config_of(pristine["wsl"])) == Platform.WSL
    assert platforms.platform_of(node.config) == Platform.NVML
    os.unlink(f"{tegra.driver_root}/etc/nv_tegra_release")
    assert platforms.platform_of(config_of(tegra)) == Platform.TEGRA, "by the chip's family"
    os.chmod(f"{tegra.sys}/devices/soc0/family", 0o644)
    Path(tegra.sys, "devices/soc0/family").write_text("Snapdragon\n")
    assert platforms.platform_of(config_of(tegra)) == Platform.NVML


def test_platform_can_be_configured(tegra: SimulatedNode, node: Node) -> None:
    config = changed(config_of(tegra), platform=Platform.NVML)
    assert platforms.platform_of(config) == Platform.NVML
    assert platforms.platform_of(changed(node.config, platform=Platform.WSL)) == Platform.WSL


def test_tegra_machine_without_lists_is_like_any_other(tegra: SimulatedNode) -> None:
    shutil.rmtree(f"{tegra.driver_root}/{LISTS}")
    assert platforms.platform_of(config_of(tegra)) == Platform.NVML


@pytest.mark.parametrize(
    ("gpus", "nvgpu", "expected"),
    [
        (("0000:01:00.0",), False, Platform.TEGRA),
        (("0000:01:00.0", "0009:01:00.0"), False, Platform.TEGRA),
        (("0009:01:00.0",), False, Platform.NVML),
        (("0009:01:00.0",), True, Platform.TEGRA),
    ],
)
def test_tegra_machine_with_discrete_gpus_alone_is_like_any_other(
    tegra: SimulatedNode, gpus: tuple[str, ...], nvgpu: bool, expected: str
) -> None:
    for gpu in gpus:
        os.makedirs(f"{tegra.proc}/driver/nvidia/gpus/{gpu}")
    if nvgpu:
        os.makedirs(f"{tegra.sys}/module/nvgpu")
    assert platforms.platform_of(config_of(tegra)) == expected


def test_configuration_names_platform_and_lists() -> None:
    text = b'[node]\nplatform = "tegra"\ncsv-directory = "/lists"\n'
    config = parse_config(text, "config.toml")
    assert (config.platform, config.csv_directory) == (Platform.TEGRA, "/lists")
    with pytest.raises(WrongConfigValue, match="wsl"):
        parse_config(b'[node]\nplatform = "amiga"\n', "config.toml")
    theirs = (
        b'[nvidia-container-runtime]\nmode = "csv"\n'
        b'[nvidia-container-runtime.modes.csv]\nmount-spec-path = "/lists"\n'
    )
    config = parse_nvidia_config(theirs, "config.toml")
    assert (config.platform, config.csv_directory) == (Platform.TEGRA, "/lists")


# --- Lists


@pytest.mark.parametrize(
    ("line", "entry"),
    [
        ("dev, /dev/nvmap", Entry("dev", "/dev/nvmap")),
        ("  dev ,/dev/nvmap\t", Entry("dev", "/dev/nvmap")),
        ("dev,nvmap", Entry("dev", "/dev/nvmap")),
        ("lib, /a/path,with,commas", Entry("lib", "/a/path,with,commas")),
        ("dir, /a//b/../c/", Entry("dir", "/a/c")),
        ("sym, //a", Entry("sym", "/a")),
        ("lib, /../../etc", Entry("lib", "/etc")),
        ("", None),
        ("   \t", None),
        ("# dev, /dev/nvmap", None),
    ],
)
def test_line_of_a_list(line: str, entry: Entry | None) -> None:
    assert parse(line, "x.csv") == ([entry] if entry is not None else [], [])


@pytest.mark.parametrize(
    "line", [",", "dev,", "dev", "DEV, /a", "file, /a", "lib, a", "lib /a", "lib, /a\0b"]
)
def test_line_of_no_form_is_left_out_and_noted(line: str) -> None:
    entries, notes = parse(f"dir, /a\n{line}\n", "x.csv")
    assert entries == [Entry("dir", "/a")]
    (note,) = notes
    assert "x.csv, line 2" in note


@pytest.mark.parametrize(
    ("environment", "every"),
    [
        ([], False),
        (["NVIDIA_REQUIRE_JETPACK=csv-mounts=all"], True),
        (["NVIDIA_REQUIRE_JETPACK=csv-mounts=all", "NVIDIA_REQUIRE_JETPACK="], False),
        (["NVIDIA_REQUIRE_JETPACK=csv-mounts=base"], False),
        (["NVIDIA_REQUIRE_JETPACK_HOST_MOUNTS=csv-mounts=all"], False),
        ([7, None], False),
    ],
)
def test_container_that_wants_every_list_says_so(environment: list[object], every: bool) -> None:
    assert wants_every_file(environment) is every


# --- Tegra


@pytest.mark.parametrize("asked", ["0", "all", "0,0"])
def test_chips_gpu_is_every_listed_node(tegra: SimulatedNode, asked: str) -> None:
    contribution = given(config_of(tegra), asked)
    nodes = {
        "/dev/nvmap", "/dev/nvhost-gpu", "/dev/nvhost-ctrl-gpu", "/dev/nvgpu/igpu0/as",
        "/dev/nvgpu/igpu0/ctrl", "/dev/dri/renderD128",
    }  # fmt: skip
    assert devices(contribution.plan) == nodes
    assert contribution.granted == ("GPU 0",)
    assert contribution.plan.additional_gids == (os.stat(f"{tegra.dev}/nvmap").st_gid,)
    for device in contribution.plan.devices:
        seen = os.stat(tegra.dev + device.path.removeprefix("/dev"))
        assert (device.major, device.minor) == (os.major(seen.st_rdev), os.minor(seen.st_rdev))
        assert device.major in contribution.majors
    assert any("drivers.csv, line 8" in note for note in contribution.notes)
    missing = {missing.what for missing in contribution.plan.missing}
    assert {"/dev/no-such-node", "/usr/share/doc/no-such-package/LICENSE"} <= missing


def test_listed_files_lie_where_they_lie_on_the_host(tegra: SimulatedNode) -> None:
    plan = given(config_of(tegra)).plan
    found = mounts(plan)
    for path in (
        f"{OWN}/libcuda.so.1.1",
        f"{OWN}/libnvidia-ptxjitcompiler.so.540.4.0",
        "/lib/firmware/tegra23x",
        "/etc/nv_tegra_release",
    ):
        assert found[path] == tegra.driver_root + path
    assert "/usr/local/cuda-12.6" not in found
    assert links(plan) == {
        f"{HOME}/libcuda.so": f"{OWN}/libcuda.so",
        f"{OWN}/libcuda.so": "libcuda.so.1",
        f"{OWN}/libcuda.so.1": "libcuda.so.1.1",
        f"{OWN}/libnvidia-ptxjitcompiler.so.1": "libnvidia-ptxjitcompiler.so.540.4.0",
    }
    assert {(library.soname, library.path) for library in plan.libraries} == {
        ("libcuda.so.1", f"{OWN}/libcuda.so.1.1"),
        ("libcuda.so", f"{OWN}/libcuda.so.1.1"),
        ("libnvidia-ptxjitcompiler.so.1", f"{OWN}/libnvidia-ptxjitcompiler.so.540.4.0"),
    }
    assert plan.library_directories == (OWN,)


def test_every_list_counts_if_the_container_says_so(tegra: SimulatedNode) -> None:
    asked = ("NVIDIA_REQUIRE_JETPACK=csv-mounts=all",)
    plan = given(config_of(tegra), environment=asked).plan
    assert mounts(plan)["/usr/local/cuda-12.6"] == f"{tegra.driver_root}/usr/local/cuda-12.6"
    assert links(plan)["/usr/local/cuda"] == "/etc/alternatives/cuda"
    assert links(plan)["/etc/alternatives/cuda"] == "/usr/local/cuda-12.6"


def test_none_is_the_files_and_no_node(tegra: SimulatedNode) -> None:
    contribution = given(config_of(tegra), "none")
    assert contribution.plan.devices == ()
    assert contribution.granted == ()
    assert f"{OWN}/libcuda.so.1.1" in mounts(contribution.plan)


def test_libraries_lie_together_where_an_image_takes_no_writes(tegra: SimulatedNode) -> None:
    image = layout(writable=False)
    plan = given(config_of(tegra), image=image).plan
    directory = image.loaders[0].directory
    assert mounts(plan)[f"{directory}/libcuda.so.1.1"] == f"{tegra.driver_root}{OWN}/libcuda.so.1.1"
    assert links(plan)[f"{directory}/libcuda.so.1"] == "libcuda.so.1.1"
    assert {library.path for library in plan.libraries} >= {f"{directory}/libcuda.so.1.1"}


@pytest.mark.parametrize(
    ("asked", "error", "named"),
    [
        ("1", UnknownDevice, "this machine has GPU 0"),
        ("0,7", UnknownDevice, "GPU 7"),
        ("GPU-00000000-0000-4000-8000-000000000000", UnknownDevice, "GPU 0"),
        ("0:0", MigUnsupported, "Tegra has no MIG"),
        ("MIG-00000000-0000-4000-8000-000000000000", MigUnsupported, "Tegra has no MIG"),
    ],
)
def test_gpu_that_a_tegra_machine_has_not_is_a_typed_error(
    tegra: SimulatedNode, asked: str, error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        given(config_of(tegra), asked)


def test_tegra_machine_that_lists_nothing_is_a_typed_error(tegra: SimulatedNode) -> None:
    config = changed(config_of(tegra), platform=Platform.TEGRA, csv_directory="/no/such")
    with pytest.raises(CsvFilesMissing, match="/no/such"):
        given(config)


def test_tegra_machine_without_nodes_is_a_typed_error(tegra: SimulatedNode) -> None:
    shutil.rmtree(tegra.dev)
    os.mkdir(tegra.dev)
    with pytest.raises(PlatformNodeMissing):
        given(config_of(tegra))
    assert given(config_of(tegra), "none").plan.devices == ()


def listed(node: SimulatedNode, *lines: str) -> Config:
    """The node with one list alone."""
    for name in os.listdir(f"{node.driver_root}/{LISTS}"):
        os.unlink(f"{node.driver_root}/{LISTS}/{name}")
    Path(node.driver_root, LISTS, "l4t.csv").write_text("\n".join(lines))
    return config_of(node)


def test_what_a_list_must_not_give_is_left_out(tegra: SimulatedNode) -> None:
    """A list is root's, but a wildcard may take in more than was meant."""
    os.mknod(f"{tegra.dev}/mem", stat.S_IFCHR | 0o600, os.makedev(1, 1))
    os.mknod(f"{tegra.dev}/mmcblk0", stat.S_IFBLK | 0o600, os.makedev(179, 0))
    os.mkfifo(f"{tegra.dev}/mpipe")
    os.mkfifo(f"{tegra.driver_root}/fifo.so")
    config = listed(
        tegra,
        "dev, /dev/m*",
        "dev, /dev/nvmap",
        "lib, /fifo.so",
        "dir, /proc",
        "lib, /etc",
        "dir, /",
        "dir, /dev",
    )
    os.makedirs(f"{tegra.driver_root}/proc")
    plan = given(config).plan
    assert devices(plan) == {"/dev/nvmap"}
    assert set(mounts(plan)) == {"/etc/nv_tegra_release"}
    missing = {missing.what for missing in plan.missing}
    assert missing == {
        "/dev/mem",
        "/dev/mmcblk0",
        "/dev/mpipe",
        "/fifo.so",
        "/proc",
        "/etc",
        "/",
        "/dev",
    }


def test_links_of_every_shape_end_within_the_driver_root(tegra: SimulatedNode) -> None:
    root = Path(tegra.driver_root)
    (root / "real").mkdir()
    (root / "real/file").write_text("x")
    for name, target in {
        "absolute": "/real/file",
        "upwards": "../../../../real/file",
        "directory": "real",
        "loop": "loop",
        "nowhere": "no/such",
        "chain": "absolute",
    }.items():
        (root / name).symlink_to(target)
    names = ("absolute", "upwards", "directory/file", "loop", "nowhere", "chain")
    plan = given(listed(tegra, *(f"sym, /{name}" for name in names), "dev, nvmap")).plan
    assert mounts(plan)["/real/file"] == f"{root}/real/file"
    assert links(plan) == {
        "/absolute": "/real/file",
        "/upwards": "/real/file",
        "/chain": "absolute",
    }
    assert {missing.what for missing in plan.missing} == {"/loop", "/nowhere"}


@pytest.fixture
def thor(tegra: SimulatedNode, node: Node) -> Config:
    """A machine with the chip's GPU in procfs and a discrete one beside it."""
    node.add_gpu(2, bus="0009:01:00.0", drm=True)
    for bus in os.listdir(node.proc / "driver/nvidia/gpus"):
        if bus != "0009:01:00.0":
            shutil.rmtree(node.proc / "driver/nvidia/gpus" / bus)
    (node.dev / "nvidia0").unlink()
    (node.dev / "nvidia1").unlink()
    node.add_gpu(0, bus="0000:01:00.0")
    node.add_node("nvidia1", 195, 1)  # the chip's display
    node.add_node("nvmap", 10, 121)
    lists = node.driver / LISTS
    lists.mkdir(parents=True)
    lines = ["dev, /dev/nvmap", "dev, /dev/nvidia0", "dev, /dev/nvidiactl", "dev, /dev/dri/*"]
    (lists / "devices.csv").write_text("\n".join(lines))
    return changed(
        node.config,
        platform=Platform.TEGRA,
        driver_root=str(node.driver),
    )


@pytest.mark.parametrize(
    ("asked", "gpus"),
    [
        ("0", {"nvidia0", "nvidia1"}),
        ("1", {"nvidia2", "dri/card2", "dri/renderD130", "nvidia-modeset", "nvidia-uvm",
               "nvidia-uvm-tools"}),
        ("GPU-00000002-aaaa-bbbb-cccc-0123456789ab", {"nvidia2", "dri/card2", "dri/renderD130",
               "nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools"}),
        ("GPU-00000000-aaaa-bbbb-cccc-0123456789ab", {"nvidia0", "nvidia1"}),
        ("all", {"nvidia0", "nvidia1", "nvidia2", "dri/card2", "dri/renderD130",
                 "nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools"}),
    ],
)  # fmt: skip
def test_discrete_gpu_beside_the_chips_is_given_alone(
    thor: Config, asked: str, gpus: set[str]
) -> None:
    expected = {f"/dev/{name}" for name in (*gpus, "nvmap", "nvidiactl")}
    assert devices(given(thor, asked).plan) == expected


def test_third_gpu_of_two_is_a_typed_error(thor: Config) -> None:
    with pytest.raises(UnknownDevice, match=r"GPU 0 \(GPU-00000000.*, 1 \(GPU-00000002"):
        given(thor, "2")


def test_excluded_gpu_is_in_no_all_and_cannot_be_named(thor: Config) -> None:
    config = changed(thor, excluded_gpus=("0009:01:00.0",))
    contribution = given(config)
    assert contribution.granted == ("GPU 0",)
    paths = devices(contribution.plan)
    assert not paths & {"/dev/nvidia2", "/dev/dri/card2", "/dev/dri/renderD130"}
    with pytest.raises(GpuExcluded):
        given(config, "1")
    config = changed(thor, excluded_gpus=("0009:01:00.0", uuid_of(0)))
    with pytest.raises(NoGpus, match="exclude-gpus"):
        given(config)


def test_requirements_that_cannot_be_checked_are_noted(tegra: SimulatedNode) -> None:
    request = Request(
        parse_names(["0"], asked="0").devices,
        requirements=(("NVIDIA_REQUIRE_CUDA", "cuda>=99"),),
    )
    contribution = platforms.contribute({"process": {}}, request, config_of(tegra), layout())
    assert any("NVIDIA_REQUIRE_CUDA=cuda>=99" in note for note in contribution.notes)


# --- WSL2


def test_gpus_of_windows_are_one_device_and_the_drivers_files(wsl: SimulatedNode) -> None:
    contribution = given(config_of(wsl))
    assert [(d.path, d.major, d.minor) for d in contribution.plan.devices] == [
        ("/dev/dxg", 10, 127)
    ]
    found = mounts(contribution.plan)
    for name in (
        "libcuda.so.1.1", "libcuda_loader.so", "libnvidia-ml.so.1", "libnvidia-ml_loader.so",
        "libnvidia-ptxjitcompiler.so.1", "libnvdxgdmal.so.1", "nvcubins.bin", "nvidia-smi",
        "libnvcuvid.so.1", "libnvdxdlkernels.so",
    ):  # fmt: skip
        assert found[f"/{STORE}/{name}"] == f"{wsl.driver_root}/{STORE}/{name}"
    assert "/usr/lib/wsl/lib/libdxcore.so" in found
    assert f"/{STORE}/nv_dispi.inf" not in found
    assert links(contribution.plan)["/usr/bin/nvidia-smi"] == f"/{STORE}/nvidia-smi"
    cached = {library.soname: library.path for library in contribution.plan.libraries}
    assert cached["libcuda.so.1"] == f"/{STORE}/libcuda.so.1.1"
    assert cached["libdxcore.so"] == "/usr/lib/wsl/lib/libdxcore.so"
    assert contribution.plan.missing == ()


@pytest.mark.parametrize(
    ("capabilities", "there", "absent"),
    [
        ("utility", {"nvidia-smi", "libnvidia-ml.so.1", "libnvdxdlkernels.so"},
         {"libcuda.so.1.1", "libnvcuvid.so.1", "nvcubins.bin"}),
        ("compute", {"libcuda.so.1.1", "nvcubins.bin"}, {"nvidia-smi", "libnvcuvid.so.1"}),
        ("video", {"libcuda.so.1.1", "libnvcuvid.so.1"}, {"nvidia-smi"}),
    ],
)  # fmt: skip
def test_capabilities_choose_among_the_files_of_windows(
    wsl: SimulatedNode, capabilities: str, there: set[str], absent: set[str]
) -> None:
    plan = given(config_of(wsl), "0", capabilities=capabilities).plan
    names = {os.path.basename(path) for path in mounts(plan)}
    assert there <= names
    assert not absent & names
    assert "libdxcore.so" in names


def test_data_of_the_driver_lies_beside_libraries_wherever_they_lie(wsl: SimulatedNode) -> None:
    image = layout(writable=False)
    plan = given(config_of(wsl), image=image).plan
    directory = image.loaders[0].directory
    assert {os.path.dirname(path) for path in mounts(plan)} == {directory}
    assert f"{directory}/nvcubins.bin" in mounts(plan)
    assert links(plan)["/usr/bin/nvidia-smi"] == f"{directory}/nvidia-smi"


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ("1", UnknownDevice),
        ("GPU-00000000-0000-4000-8000-000000000000", UnknownDevice),
        ("0:0", MigUnsupported),
    ],
)
def test_windows_has_no_other_device(
    wsl: SimulatedNode, asked: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        given(config_of(wsl), asked)


def test_driver_in_use_is_the_one_whose_loader_linux_has(wsl: SimulatedNode) -> None:
    root = Path(wsl.driver_root)
    other = root / STORE / "../nv_dispi.inf_amd64_fedcba9876543210"
    shutil.copytree(root / STORE, other)
    os.utime(other / "libcuda.so.1.1", (2**31, 2**31))
    with (other / "libcuda_loader.so").open("ab") as file:
        file.write(b"newer")
    contribution = given(config_of(wsl))
    assert f"/{STORE}/libcuda.so.1.1" in mounts(contribution.plan)
    assert contribution.notes == ()
    (root / "usr/lib/wsl/lib/libcuda.so.1.1").unlink()
    contribution = given(config_of(wsl))
    assert f"/{STORE}/libcuda.so.1.1" not in mounts(contribution.plan)
    assert "2 drivers" in contribution.notes[0]


def test_windows_without_a_driver_is_a_typed_error(wsl: SimulatedNode) -> None:
    os.unlink(f"{wsl.driver_root}/{STORE}/libcuda.so.1.1")
    with pytest.raises(DriverStoreMissing, match="wsl --shutdown"):
        given(config_of(wsl))


@pytest.mark.parametrize("instead", ["nothing", "a file", "another device"])
def test_windows_without_its_device_is_a_typed_error(wsl: SimulatedNode, instead: str) -> None:
    path = Path(wsl.dev, "dxg")
    path.unlink()
    if instead == "a file":
        path.touch()
    elif instead == "another device":
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(10, 200))
    config = changed(config_of(wsl), platform=Platform.WSL)
    with pytest.raises(PlatformNodeMissing):
        given(config)
    assert given(config, "none").plan.devices == ()


def test_features_alone_bring_no_gpu(pristine: dict[str, SimulatedNode]) -> None:
    for node in pristine.values():
        request = Request(Void(), features=frozenset({"gds"}))
        contribution = platforms.contribute({"process": {}}, request, config_of(node), layout())
        assert contribution.plan.devices == ()


@pytest.mark.parametrize(
    ("name", "told"),
    [("tegra", "NVIDIA Tegra: GPU 0"), ("wsl", "NVIDIA WSL2: every GPU of Windows")],
)
def test_explanation_needs_no_inventory(
    pristine: dict[str, SimulatedNode],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    told: str,
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=0"], "user": {}}}))
    assert main(["explain", str(path), "--config", pristine[name].config_path]) == 0
    assert told in capsys.readouterr().out
