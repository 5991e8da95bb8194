"""Detecting a node's platform, and what a container gets on Tegra and in WSL2."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from hooks import engine, platforms
from hooks.config import Config, Platform, load_config, parse_config
from hooks.config.nvidia import parse_nvidia_config
from hooks.errors import WrongConfigValue
from hooks.image.layout import Layout, Libc, Loader
from hooks.platforms.tegra import Entry, parse, wants_every_file
from hooks.requests.naming import parse_names
from hooks.requests.request import Request, parse_capabilities
from hooks.words import Arch, Void, items_of
from integration.cli.app import main
from integration.simulated import Scenario, SimulatedNode
from integration.simulated.platforms import LISTS, STORE
from tests.unit.hooks.fake_node import Node, put_directory, uuid_of
from tests.unit.hooks.golden import Golden, outcome

Change = Callable[[SimulatedNode], Any]

MACHINE = os.uname().machine


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, SimulatedNode]]:
    """Make a node of each platform once; tests must not change them."""
    top = tmp_path_factory.mktemp("platforms")
    made = {
        name: SimulatedNode.create(str(top / name), Scenario.parse({"platform": name}))
        for name in ("tegra", "wsl")
    }
    yield made
    for node in made.values():
        node.remove()


@pytest.fixture
def copied(
    pristine: dict[str, SimulatedNode], tmp_path: Path
) -> Iterator[Callable[[str], SimulatedNode]]:
    """Copy a platform's node for a test that changes it."""
    made = []

    def copy(name: str) -> SimulatedNode:
        node, directory = pristine[name], tmp_path / name
        shutil.copytree(node.directory, directory, symlinks=True, copy_function=_copy)
        path = directory / "config.toml"
        path.write_text(path.read_text().replace(node.directory, str(directory)))
        made.append(SimulatedNode.open(str(directory)))
        return made[-1]

    yield copy
    for node in made:
        node.remove()


def _copy(source: str, target: str) -> str:
    seen = os.lstat(source)
    if stat.S_ISCHR(seen.st_mode):  # shutil would read from the device
        os.mknod(target, seen.st_mode, seen.st_rdev)
        os.chmod(target, stat.S_IMODE(seen.st_mode))
        os.chown(target, seen.st_uid, seen.st_gid)
        return target
    if stat.S_ISREG(seen.st_mode) and seen.st_size > 1 << 16:
        os.link(source, target)  # a library, which is not written to
        return target
    return str(shutil.copy2(source, target, follow_symlinks=False))


@pytest.fixture
def tegra(copied: Callable[[str], SimulatedNode]) -> SimulatedNode:
    return copied("tegra")


def layout(*, writable: bool = True) -> Layout:
    arch = Arch(MACHINE)
    home = f"/usr/lib/{MACHINE}-linux-gnu" if writable else f"/run/containerd-shim-nvidia/{MACHINE}"
    return Layout(
        (Loader(arch, Libc.GLIBC, home, searched=writable),),
        writable=writable,
        scratch=None if writable else "/run",
    )


def config_of(node: SimulatedNode) -> Config:
    return load_config(node.config_path)


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
    config = replace(config_of(tegra), platform=Platform.NVML)
    assert platforms.platform_of(config) == Platform.NVML
    assert platforms.platform_of(replace(node.config, platform=Platform.WSL)) == Platform.WSL


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


# --- What a container gets: platforms.json has the result of each case


@dataclass(frozen=True, slots=True)
class Case:
    """A request on a node."""

    node: str  # the platform of the node; a copy is changed
    devices: str = "all"
    change: Change | None = None
    capabilities: str = "all"
    environment: tuple[str, ...] = ()
    writable: bool = True
    # settings of the configuration; paths are below the node's directory
    more: dict[str, Any] | None = None
    request: dict[str, Any] | None = None


def listing(*lines: str) -> Change:
    """Keep only one list on the node."""

    def change(node: SimulatedNode) -> None:
        lists = Path(node.driver_root, LISTS)
        for path in lists.iterdir():
            path.unlink()
        (lists / "l4t.csv").write_text("\n".join(lines))

    return change


def add_what_must_not_be_given(node: SimulatedNode) -> None:
    os.mknod(f"{node.dev}/mem", stat.S_IFCHR | 0o600, os.makedev(1, 1))
    os.mknod(f"{node.dev}/mmcblk0", stat.S_IFBLK | 0o600, os.makedev(179, 0))
    os.mkfifo(f"{node.dev}/mpipe")
    os.mkfifo(f"{node.driver_root}/fifo.so")
    os.makedirs(f"{node.driver_root}/proc")
    lines = ("dev, /dev/m*", "dev, /dev/nvmap", "lib, /fifo.so", "dir, /proc", "lib, /etc")
    listing(*lines, "dir, /", "dir, /dev")(node)


def add_links_of_every_shape(node: SimulatedNode) -> None:
    root = Path(node.driver_root)
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
    listing(*(f"sym, /{name}" for name in names), "dev, nvmap")(node)


def add_a_driver_of_windows(node: SimulatedNode) -> None:
    """Add a newer driver, which is not in use."""
    store = Path(node.driver_root, STORE)
    other = store.with_name("nv_dispi.inf_amd64_fedcba9876543210")
    shutil.copytree(store, other)
    os.utime(other / "libcuda.so.1.1", (2**31, 2**31))
    with (other / "libcuda_loader.so").open("ab") as file:
        file.write(b"newer")


def forget_the_driver_in_use(node: SimulatedNode) -> None:
    add_a_driver_of_windows(node)
    os.unlink(f"{node.driver_root}/usr/lib/wsl/lib/libcuda.so.1.1")


def no_devices(node: SimulatedNode) -> None:
    shutil.rmtree(node.dev)
    os.mkdir(node.dev)


def another_dxg(node: SimulatedNode) -> None:
    os.unlink(f"{node.dev}/dxg")
    os.mknod(f"{node.dev}/dxg", stat.S_IFCHR | 0o666, os.makedev(10, 200))


NO_DXG: Change = lambda node: os.unlink(f"{node.dev}/dxg")  # noqa: E731
A_UUID = "GPU-00000000-0000-4000-8000-000000000000"
WSL = {"platform": Platform.WSL}
EVERY_LIST = ("NVIDIA_REQUIRE_JETPACK=csv-mounts=all",)
CASES = {
    "tegra": Case("tegra"),
    "tegra, by index": Case("tegra", "0"),
    "tegra, twice": Case("tegra", "0,0"),
    "tegra, no device": Case("tegra", "none"),
    "tegra, every list": Case("tegra", environment=EVERY_LIST),
    "tegra, image that takes no writes": Case("tegra", writable=False),
    "tegra, GPU that is not there": Case("tegra", "1"),
    "tegra, one GPU that is not there": Case("tegra", "0,7"),
    "tegra, UUID": Case("tegra", A_UUID),
    "tegra, MIG index": Case("tegra", "0:0"),
    "tegra, MIG UUID": Case("tegra", A_UUID.replace("GPU", "MIG")),
    "tegra, nothing listed": Case(
        "tegra", more={"platform": Platform.TEGRA, "csv_directory": "/no/such"}
    ),
    "tegra, no nodes": Case("tegra", change=no_devices),
    "tegra, no nodes and none asked": Case("tegra", "none", change=no_devices),
    # Lists belong to root, but a wildcard may match more than was intended.
    "tegra, what must not be given": Case("tegra", change=add_what_must_not_be_given),
    "tegra, links": Case("tegra", change=add_links_of_every_shape),
    "tegra, requirement": Case(
        "tegra", "0", request={"requirements": (("NVIDIA_REQUIRE_CUDA", "cuda>=99"),)}
    ),
    "tegra, features alone": Case(
        "tegra", request={"devices": Void(), "features": frozenset({"gds"})}
    ),
    "thor": Case("thor"),
    "thor, the chip's": Case("thor", "0"),
    "thor, the chip's by UUID": Case("thor", uuid_of(0)),
    "thor, the discrete one": Case("thor", "1"),
    "thor, the discrete one by UUID": Case("thor", uuid_of(2)),
    "thor, a third": Case("thor", "2"),
    "thor, one excluded": Case("thor", more={"excluded_gpus": ("0009:01:00.0",)}),
    "thor, the excluded one": Case("thor", "1", more={"excluded_gpus": ("0009:01:00.0",)}),
    "thor, both excluded": Case("thor", more={"excluded_gpus": ("0009:01:00.0", uuid_of(0))}),
    "wsl": Case("wsl"),
    "wsl, utility": Case("wsl", "0", capabilities="utility"),
    "wsl, compute": Case("wsl", "0", capabilities="compute"),
    "wsl, video": Case("wsl", "0", capabilities="video"),
    "wsl, image that takes no writes": Case("wsl", writable=False),
    "wsl, GPU that is not there": Case("wsl", "1"),
    "wsl, UUID": Case("wsl", A_UUID),
    "wsl, MIG index": Case("wsl", "0:0"),
    "wsl, two drivers": Case("wsl", change=add_a_driver_of_windows),
    "wsl, two drivers and no sign": Case("wsl", change=forget_the_driver_in_use),
    "wsl, no driver": Case(
        "wsl", change=lambda node: os.unlink(f"{node.driver_root}/{STORE}/libcuda.so.1.1")
    ),
    "wsl, no node": Case("wsl", change=NO_DXG, more=WSL),
    "wsl, no node and none asked": Case("wsl", "none", change=NO_DXG, more=WSL),
    "wsl, a directory": Case("wsl", change=lambda n: put_directory(Path(n.dev, "dxg")), more=WSL),
    "wsl, another device": Case("wsl", change=another_dxg, more=WSL),
    "wsl, features alone": Case("wsl", request={"devices": Void(), "features": frozenset({"gds"})}),
}


@pytest.fixture
def thor(bare_node: Node) -> Config:
    """Make a machine with the chip's GPU in procfs and an additional discrete GPU."""
    node = bare_node
    node.add_kernel()
    node.add_driver()
    node.add_gpu(2, bus="0009:01:00.0", drm=True)
    node.add_gpu(0, bus="0000:01:00.0")
    node.add_node("nvidia1", 195, 1)  # the chip's display
    node.add_node("nvmap", 10, 121)
    lines = ["dev, /dev/nvmap", "dev, /dev/nvidia0", "dev, /dev/nvidiactl", "dev, /dev/dri/*"]
    node.write(node.driver / LISTS / "devices.csv", "\n".join(lines))
    return replace(node.config, platform=Platform.TEGRA)


@pytest.mark.parametrize("name", CASES)
def test_container_gets(
    name: str,
    thor: Config,
    pristine: dict[str, SimulatedNode],
    copied: Callable[[str], SimulatedNode],
) -> None:
    case, config = CASES[name], thor
    if case.node != "thor":
        node = copied(case.node) if case.change is not None else pristine[case.node]
        if case.change is not None:
            case.change(node)
        config = config_of(node)
    config = replace(config, **case.more or {})
    names = parse_names(items_of(case.devices), asked=case.devices)
    request = Request(
        names.devices,
        parse_capabilities(case.capabilities),
        source=f"NVIDIA_VISIBLE_DEVICES={case.devices}",
    )
    request = replace(request, **case.request or {})
    spec = {"process": {"env": list(case.environment)}}
    image = layout(writable=case.writable)
    found = outcome(
        lambda: [platforms.contribute(spec, request, config, image)],
        config.dev,
        {str(config.driver_root): "ROOT", config.dev: "DEV", STORE: "STORE", MACHINE: "MACHINE"},
    )
    Golden("platforms.json").compare(name, found)


@pytest.mark.parametrize("name", ["tegra", "wsl"])
def test_empty_file_of_the_image_does_not_hide_libcuda(
    pristine: dict[str, SimulatedNode], rootfs: Path, tmp_path: Path, name: str
) -> None:
    (rootfs / "opt/lib").mkdir(parents=True)
    (rootfs / "opt/lib/libcuda.so.1").touch()
    variables = ["NVIDIA_VISIBLE_DEVICES=all", "LD_LIBRARY_PATH=/opt/lib"]
    spec = {"process": {"env": variables, "user": {"uid": 0, "gid": 0}}, "mounts": []}
    config = config_of(pristine[name])
    target = engine.RootfsTarget(str(rootfs), str(tmp_path / "staging"))
    done = engine.inject(spec, engine.read_request(spec, config), None, target, config=config).spec
    sources = {mount["destination"]: mount["source"] for mount in done["mounts"]}
    cover = sources.pop("/opt/lib/libcuda.so.1")
    assert os.path.basename(cover).startswith("libcuda.so.1")
    assert cover in sources.values()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tegra", "granted    NVIDIA Tegra GPU 0"),
        ("wsl", "granted    NVIDIA WSL2 every GPU of Windows"),
    ],
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
