"""Driver files and packages are explained by name."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from hooks.config import load_config
from hooks.node.capabilities import FILES, NODES
from hooks.words import CAPABILITIES
from integration import exits
from integration.cli.app import main
from integration.inspection import image_packages
from integration.inspection.driver_files import ORDER, capabilities_of, find_on_node, rows_named
from integration.inspection.driver_packages import (
    known_packages,
    not_granted,
    package_named,
    packages_that_open,
)
from integration.inspection.image_packages import advice, lacks_of
from tests.unit.hooks.fake_node import MULTIARCH, VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.unit.hooks.fake_node import Elves, Node

DEFAULT: Final = {"grant": {"capabilities": ["compute", "utility"]}}
SITE: Final = "usr/local/lib/python3.12/site-packages"


@pytest.mark.parametrize(
    ("name", "capabilities"),
    [
        ("libnvcuvid.so.1", "video"), ("libnvcuvid.so.535.261.03", "video"),
        ("libnvcuvid", "video"),
        ("libcuda.so", "compute video"), ("libnvidia-ml.so.1", "utility"),
        ("/usr/bin/nvidia-smi", "utility"), ("libGLX_indirect.so.0", "graphics display"),
        ("nvidia-drm_gbm.so", "graphics display"), ("nvidia_drv.so", "display"),
        ("/etc/OpenCL/vendors/nvidia.icd", "compute"), ("nvidia_icd.json", "graphics display"),
        ("nvidia-uvm", "compute video"), ("/tmp/nvidia-mps", "compute"),
        ("/usr/share/nvidia/nvidia-application-profiles-535.261.03-rc", "compute"),
        ("icd.d/nvidia_icd.json", "graphics display"),
    ],
)  # fmt: skip
def test_a_file_is_known_by_any_of_its_names(name: str, capabilities: str) -> None:
    assert capabilities_of(rows_named(name)) == tuple(capabilities.split())


@pytest.mark.parametrize("name", ["/dev/nvidiactl", "gsp_ga10x.bin"])
def test_what_every_container_gets_has_no_capability(name: str) -> None:
    assert rows_named(name)
    assert capabilities_of(rows_named(name)) == ()


@pytest.mark.parametrize(
    "name", ["", "web", "libc.so.6", "libcudart.so.13", "nvidia-modprobe", "default/nvidia-smi"]
)
def test_another_name_is_no_file_of_the_driver(name: str) -> None:
    assert rows_named(name) == ()


# -- the data -------------------------------------------------------------------------------


def test_every_package_needs_what_brings_the_files_that_it_opens() -> None:
    names: list[str] = []
    for package in known_packages():
        names += sorted(package.names)
        assert package.needs, package.name
        assert {*package.needs, *package.also} <= CAPABILITIES == set(ORDER)
        assert set(package.how) <= {"traced", "bare", "names"}
        assert bool(package.opens) == (package.how != ("names",)), package.name
        granted = {*package.needs, *package.also}
        for name in (*package.opens, *package.mentions):
            rows = rows_named(name)
            assert rows, (package.name, name)
            assert not capabilities_of(rows) or granted & set(capabilities_of(rows)), (
                package.name,
                name,
            )
        assert not_granted(package, package.needs) == []
        assert not_granted(package, ()) == list(package.needs)
    assert len(names) == len(set(names)), "a name stands for two packages"


@pytest.mark.parametrize(
    ("package", "granted", "lacking"),
    [
        ("torchcodec", "compute utility", "video"), ("torchcodec", "video", ""),
        ("torch", "video", ""), ("torch", "utility", "compute"),
        ("pyopencl", "video", "compute"),  # compute alone includes its manifest
        ("nvidia-nccl-cu13", "compute", "utility"), ("wgpu", "display", ""),
    ],
)  # fmt: skip
def test_a_capability_that_has_the_files_of_another_is_enough(
    package: str, granted: str, lacking: str
) -> None:
    found = package_named(package)
    assert found
    assert not_granted(found, set(granted.split())) == lacking.split()


def test_packages_are_found_by_files_and_by_names_as_indexes_compare_them() -> None:
    asking = {package.name for package in packages_that_open(rows_named("libnvcuvid.so.1"))}
    assert {"torchcodec", "pynvvideocodec"} <= asking
    assert "torch" not in asking
    for name in ("PyNvVideoCodec", "nvidia_NCCL.cu12", "NCCL"):
        assert package_named(name)
    assert package_named("flask") is None


# -- the command ----------------------------------------------------------------------------


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["explain", *words]) == exits.OK
    return " ".join(capsys.readouterr().out.split())


def test_a_file_is_explained_with_its_place_on_this_node(
    node: Node, config_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--config", config_file, "--containerd-state", str(tmp_path))
    (path,) = find_on_node(rows_named("libcuda.so"), load_config(config_file)).paths
    assert path.startswith(f"{node.config.driver_root}/")
    text = told(capsys, "libcuda.so.1", *where)
    assert text.startswith("file libcuda.so.1, of NVIDIA's driver capability compute or video ")
    assert f"thisnode{path}askedby" in text.replace(" ", "")  # a long path is wrapped
    assert " torch," in text
    assert "NVIDIA_DRIVER_CAPABILITIES=compute see" in text
    document = json.loads(told(capsys, "/dev/nvidiactl", "-o", "json", *where))
    assert document["kind"] == "DriverFile"
    assert document["paths"] == [f"{node.config.dev}/nvidiactl"]
    # An existing path is a spec, unless it is a driver file.
    assert "capability compute" in told(capsys, path, *where)
    assert told(capsys, "10_nvidia.json", *where).startswith("file 10_nvidia.json, of NVIDIA")


def test_a_library_that_no_capability_knows_comes_with_all(
    node: Node, config_file: str, tmp_path: Path, elves: Elves, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--config", config_file, "--containerd-state", str(tmp_path))
    assert main(["explain", "libnvidia-new.so.1", *where]) == exits.FAILED
    assert capsys.readouterr().err.startswith("NVSHIM-E2511 ")
    path = Path(str(node.config.driver_root), MULTIARCH, f"libnvidia-new.so.{VERSION}")
    elves.write(path, "libnvidia-new.so.1")
    for name in ("libnvidia-new.so.1", path.name, "file:libnvidia-new.so"):
        text = told(capsys, name, *where)
        assert "capability all this node /" in text
        assert "NVIDIA_DRIVER_CAPABILITIES=all see" in text


def test_a_file_is_explained_without_a_driver(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'[node]\ndriver-root = "{tmp_path}"\nproc = "{tmp_path}"\n')
    text = told(capsys, "file:nvidia-smi", "--config", str(config))
    assert "capability utility this node " in text
    assert str(tmp_path) in text


def test_a_container_s_name_has_priority_and_the_kind_can_be_said(
    make_bundle: Callable[..., str],
    config_file: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = ("--config", config_file, "--containerd-state", str(tmp_path / "state"))
    assert told(capsys, "Torch", *where).startswith("package torch ")
    make_bundle("torch")
    make_bundle("nvidia-smi")
    assert told(capsys, "torch", *where).startswith("container torch (")
    assert told(capsys, "package:torch", *where).startswith("package torch ")
    assert told(capsys, "nvidia-smi", *where).startswith("container nvidia-smi (")
    assert told(capsys, "file:nvidia-smi", *where).startswith("file nvidia-smi,")
    for wrong in ("file:torch", "package:nvidia-smi", "package:"):
        assert main(["explain", wrong, *where]) == exits.FAILED
        assert capsys.readouterr().err.startswith("NVSHIM-E2519 name-unknown: ")
    for unknown in ("flask", "default/nvidia-smi"):  # of a pod that is gone
        assert main(["explain", unknown, *where]) == exits.FAILED
        assert capsys.readouterr().err.startswith("NVSHIM-E2511 ")


# -- packages of an image -------------------------------------------------------------------


def install(root: Path, *names: str, site: str = SITE) -> None:
    for name in names:
        (root / site / name).mkdir(parents=True)


def lacking(root: Path, *path: str, record: Any = DEFAULT) -> list[str]:
    environment = [f"PATH={':'.join(path)}"] if path else []
    spec = {"process": {"env": environment, "args": ["/opt/app/bin/serve"]}}
    return [each.package.name for each in lacks_of(str(root), spec, record)]


@pytest.mark.parametrize(
    ("site", "path"),
    [
        (SITE, ()),
        ("usr/lib/python3/dist-packages", ()),
        ("usr/lib64/python3.9/site-packages", ()),
        ("opt/venv/lib/python3.11/site-packages", ("/usr/bin", "/opt/venv/bin")),
        ("opt/app/lib/python3.13/site-packages", ()),  # of the image's program
    ],
)
def test_packages_are_found_in_every_python_that_the_container_can_run(
    tmp_path: Path, site: str, path: Sequence[str]
) -> None:
    install(tmp_path, "torchcodec-0.9.dist-info", "torch-2.9.dist-info", site=site)
    assert lacking(tmp_path, *path) == ["torchcodec"]
    assert lacking(tmp_path, *path, record={"grant": {"capabilities": ["video"]}}) == []
    assert lacking(tmp_path, *path, record={}) == []


def test_the_last_path_of_the_environment_counts(tmp_path: Path) -> None:
    """It is the one that the process sees."""
    install(tmp_path, "wgpu-1.dist-info", site="opt/venv/lib/python3.11/site-packages")
    for path in (["PATH=/opt/venv/bin", "PATH=/usr/bin"], ["PATH=/usr/bin", "PATH=/opt/venv/bin"]):
        found = lacks_of(str(tmp_path), {"process": {"env": path}}, DEFAULT)
        assert bool(found) == path[-1].endswith("venv/bin"), path


def test_advice_is_one_line_with_the_variable(tmp_path: Path) -> None:
    install(tmp_path, "PyNvVideoCodec-2.0.dist-info", "wgpu-0.30.dist-info")
    assert advice(lacks_of(str(tmp_path), {}, DEFAULT), DEFAULT) == (
        "pynvvideocodec uses video, wgpu uses graphics, which was not granted: "
        "request NVIDIA_DRIVER_CAPABILITIES=compute,utility,graphics,video"
    )
    assert advice([], DEFAULT) == ""


def test_an_image_cannot_mislead_or_stop_the_look(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    install(outside, "av-9.dist-info", site="lib/python3.9/site-packages")
    install(root, "wgpu-1.dist-info", "torchcodec-1.dist-infos", "x\n-1.dist-info")
    (root / "usr/lib").symlink_to(outside / "lib")  # leads nowhere in the image
    (root / "usr/local/lib/python3.9").mkdir()
    os.mkfifo(root / "usr/local/lib/python3.9/site-packages")
    (root / "usr/local/lib/python3.8").symlink_to("python3.8")
    assert lacking(root, "relative/bin", "/a/../../bin", "/\0/bin", "/" * 5000 + "bin") == ["wgpu"]
    many = ":".join(f"/{number}/bin" for number in range(100_000))
    assert len(image_packages._prefixes({"process": {"env": [f"PATH={many}"]}})) == 16
    assert lacking(tmp_path / "nowhere") == []
    assert lacks_of("/\0", {}, DEFAULT) == []


def test_only_some_of_many_pythons_are_looked_into(tmp_path: Path) -> None:
    for minor in range(10, 30):
        (tmp_path / f"usr/lib/python3.{minor}/site-packages").mkdir(parents=True)
    install(tmp_path, "wgpu-1.dist-info", site="usr/lib/python3.11/site-packages")
    install(tmp_path, "av-1.dist-info", site="usr/lib/python3.29/site-packages")
    assert lacking(tmp_path) == ["wgpu"]


def test_a_directory_with_too_many_names_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "wgpu-1.dist-info", "a", "b")
    monkeypatch.setattr(image_packages, "_MOST_NAMES", 2)
    assert lacking(tmp_path) == []


def test_a_file_system_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()
    monkeypatch.setattr(image_packages, "_TO_LOOK", 0.01)
    monkeypatch.setattr(image_packages, "_installed", lambda *_: answered.wait() and ())
    try:
        assert lacking(tmp_path) == []
    finally:
        answered.set()


def test_nodes_of_a_needed_capability_have_to_be_there_as_well() -> None:
    assert set(NODES["compute"]) <= set(NODES["video"])
    assert set(FILES["compute"]) - set(FILES["video"])
