"""Containers with GPUs from unusual images."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from api.ttrpc import RemoteError
from integration.simulated import SimulatedNode
from tests.harness.shim import ShimByHand, StartShim
from tools.images import glibc

pytestmark = pytest.mark.anyio

GPUS: Final = ("NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=all")
LIBRARIES: Final = f"usr/lib/{os.uname().machine}-linux-gnu"
LOOK: Final = "nvidia-smi -L | grep -c UUID; probe dlopen libcuda.so.1 > /dev/null && echo loaded"


def large_soname(root: Path) -> None:
    """Create a library that the image's author has copied without its link."""
    for name in ("libcuda.so.1", "libcuda.so"):
        (root / LIBRARIES / name).write_bytes(b"an old driver's")
        os.truncate(root / LIBRARIES / name, 70 << 20)


def large_cache(root: Path) -> None:
    os.truncate(root / "etc/ld.so.cache", 3 << 20)


def dangling_drop_ins(root: Path) -> None:
    shutil.rmtree(root / "etc/ld.so.conf.d")
    (root / "etc/ld.so.conf.d").symlink_to("/nowhere/at/all")


def cyclic_drop_ins(root: Path) -> None:
    shutil.rmtree(root / "etc/ld.so.conf.d")
    (root / "etc/ld.so.conf.d").symlink_to("ld.so.conf.d")


def etc_that_leads_nowhere(root: Path) -> None:
    shutil.rmtree(root / "etc")
    (root / "etc").symlink_to("/nowhere")


def drop_ins_in_a_file(root: Path) -> None:
    shutil.rmtree(root / "etc/ld.so.conf.d")
    (root / "etc/ld.so.conf.d").write_text("no directory")


def drop_in_that_is_a_directory(root: Path) -> None:
    (root / "etc/ld.so.conf.d/00-containerd-shim-nvidia.conf/x").mkdir(parents=True)


def odd_configuration(root: Path) -> None:
    """Create a configuration that includes no drop-in, and cannot include one."""
    (root / "etc/ld.so.conf").unlink()
    (root / "etc/ld.so.conf").mkdir()
    (root / "etc/ld.so.conf/x").mkdir()


ODD: Final = (
    large_soname,
    large_cache,
    dangling_drop_ins,
    cyclic_drop_ins,
    etc_that_leads_nowhere,
    drop_ins_in_a_file,
    drop_in_that_is_a_directory,
    odd_configuration,
)


@pytest.mark.parametrize("make_odd", ODD)
async def test_container_of_an_odd_image_has_its_gpus(
    start_shim: StartShim, two_gpus: SimulatedNode, make_odd: Callable[[Path], None]
) -> None:
    async with start_shim(
        "c1", "sh", "-c", LOOK,
        env=GPUS, image=glibc(), environment={"NVSHIM_CONFIG": two_gpus.config_path},
    ) as shim:  # fmt: skip
        root = Path(shim.directory, "c1/rootfs")
        make_odd(root)
        before = _largest(root)
        assert await _run(shim) == ["2", "loaded"]
        assert _largest(root) == before  # it was not copied or replaced


@pytest.mark.parametrize("low_level", ["runc", "crun"])
@pytest.mark.parametrize("target", ["/opt/graphics", "../../nowhere", "/run/graphics", "glvnd"])
async def test_container_starts_where_a_directory_of_manifests_leads_nowhere(
    start_shim: StartShim, two_gpus: SimulatedNode, low_level: str, target: str
) -> None:
    """crun makes none behind an absolute link, and no runtime gets through a circle."""
    look = f"cat /usr/share/glvnd/egl_vendor.d/10_nvidia.json; {LOOK}"
    async with start_shim(
        "c1", "sh", "-c", look, env=GPUS, image=glibc(),
        environment={"NVSHIM_CONFIG": two_gpus.config_path}, for_crun=low_level == "crun",
    ) as shim:  # fmt: skip
        spec = shim.spec("c1")
        spec["mounts"].append({"destination": "/run", "type": "tmpfs", "source": "tmpfs"})
        shim.write_spec("c1", spec)
        share = Path(shim.directory, "c1/rootfs/usr/share")
        share.mkdir()
        (share / "glvnd").symlink_to(target)
        out = " ".join(await _run(shim, options=shim.options(low_level)))
        assert out.endswith("2 loaded")
        assert ("libEGL_nvidia" in out) is (target != "glvnd")


def committed(root: Path) -> None:
    """Create what "docker commit" leaves of a container with a GPU."""
    (root / "opt/driver").mkdir(parents=True)
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (root / "opt/driver" / name).touch(mode=0o700)


async def test_empty_files_of_a_commit_do_not_hide_the_driver(
    start_shim: StartShim, two_gpus: SimulatedNode
) -> None:
    async with start_shim(
        "c1", "sh", "-c", LOOK, env=(*GPUS, "LD_LIBRARY_PATH=/opt/driver"), image=glibc(),
        environment={"NVSHIM_CONFIG": two_gpus.config_path},
    ) as shim:  # fmt: skip
        committed(Path(shim.directory, "c1/rootfs"))
        assert await _run(shim) == ["2", "loaded"]


async def test_layer_is_made_for_an_odd_image_too(
    start_shim: StartShim, two_gpus: SimulatedNode, tmp_path: Path
) -> None:
    """Two containers share it, so the second one shows whether the layer is complete."""
    config = Path(two_gpus.config_path).read_text(encoding="utf-8").splitlines()
    config = [line for line in config if not line.startswith("layers =")]
    config.insert(config.index("[node]") + 1, f'layers = "{tmp_path}/layers"')
    (tmp_path / "config.toml").write_text("\n".join(config), encoding="utf-8")
    variables = (*GPUS, "LD_LIBRARY_PATH=/opt/driver")
    async with start_shim(
        "c1", "sh", "-c", LOOK,
        env=variables, image=glibc(), environment={"NVSHIM_CONFIG": f"{tmp_path}/config.toml"},
    ) as shim:  # fmt: skip
        image = Path(shim.directory, "c1/rootfs").rename(tmp_path / "image")
        large_soname(image)
        committed(image)
        for name in ("c1", "c2"):
            if name == "c2":
                shim.bundle("c2", "sh", "-c", LOOK, env=variables, rootfs="rootfs")
            Path(shim.directory, name, "rootfs").mkdir()
            for part in ("upper", "work"):
                (tmp_path / name / part).mkdir(parents=True)
            options = [
                "index=off",
                f"workdir={tmp_path}/{name}/work",
                f"upperdir={tmp_path}/{name}/upper",
                f"lowerdir={image}",
            ]
            mount = {"type": "overlay", "source": "overlay", "options": options}
            assert await _run(shim, name, rootfs=[mount]) == ["2", "loaded"]
            assert os.listdir(tmp_path / name / "upper") == []
        assert len(os.listdir(tmp_path / "layers")) == 1


@pytest.mark.parametrize("kind", ["bind", "ext4"])
async def test_programs_are_in_a_container_whose_root_takes_no_writes(
    start_shim: StartShim, two_gpus: SimulatedNode, kind: str
) -> None:
    """As on erofs or squashfs, where no mount point can be created for them."""
    if kind == "ext4" and not os.path.exists("/dev/loop-control"):
        pytest.skip("no loop devices: modprobe loop")
    async with start_shim(
        "c1", "sh", "-c", f"touch /new; {LOOK}; sleep 1000",
        env=GPUS, image=glibc(), environment={"NVSHIM_CONFIG": two_gpus.config_path},
    ) as shim:  # fmt: skip
        image = f"{shim.directory}/image"
        for directory in ("run", "proc", "sys", "dev"):
            Path(shim.directory, "c1/rootfs", directory).mkdir(exist_ok=True)
        os.rename(f"{shim.directory}/c1/rootfs", image)
        os.mkdir(f"{shim.directory}/c1/rootfs")
        mount = {"type": "bind", "source": image, "options": ["rbind", "ro"]}
        if kind == "ext4":
            argv = ["mkfs.ext4", "-q", "-d", image, f"{image}.ext4", "64m"]
            subprocess.run(argv, check=True)  # noqa: ASYNC221 - it takes milliseconds
            mount = {"type": "ext4", "source": f"{image}.ext4", "options": ["loop", "ro"]}
        out = _output(shim)
        await shim.run("c1", rootfs=[mount], stdout=f"file://{out}")
        log = f"{shim.directory}/exec"
        Path(log).touch()
        await shim.start_exec("c1", "e1", "nvidia-smi", "-L", stdout=f"file://{log}")
        assert await shim.reap("c1", "e1") == 0
        assert Path(log).read_text(encoding="utf-8").count("UUID: GPU-") == 2
        await shim.end("c1")
        assert out.read_text(encoding="utf-8").split() == ["2", "loaded"]


def directory_for_a_soname(root: Path) -> None:
    (root / LIBRARIES / "libcuda.so.1/x").mkdir(parents=True)


def absurd_cache(root: Path) -> None:
    os.truncate(root / "etc/ld.so.cache", 5 << 30)


def cache_that_is_a_directory(root: Path) -> None:
    (root / "etc/ld.so.cache").unlink()
    (root / "etc/ld.so.cache/x").mkdir(parents=True)


def etc_that_leads_to_itself(root: Path) -> None:
    shutil.rmtree(root / "etc")
    (root / "etc").symlink_to("etc")


@pytest.mark.parametrize(
    "make_odd",
    [directory_for_a_soname, absurd_cache, cache_that_is_a_directory, etc_that_leads_to_itself],
)
async def test_refusal_of_an_image_says_in_a_line_what_to_do(
    start_shim: StartShim, two_gpus: SimulatedNode, make_odd: Callable[[Path], None]
) -> None:
    async with start_shim(
        "c1", "sh", "-c", LOOK,
        env=GPUS, image=glibc(), environment={"NVSHIM_CONFIG": two_gpus.config_path},
    ) as shim:  # fmt: skip
        make_odd(Path(shim.directory, "c1/rootfs"))
        with pytest.raises(RemoteError) as caught:
            await shim.create("c1")
        said = str(caught.value)
        assert "\n" not in said
        assert "NVSHIM-E03" in said
        assert re.search(r"\. [A-Z]", said)
        assert shim.leftovers() == [f"socket {shim.socket_path}", f"process {shim.pid}"]


async def _run(shim: ShimByHand, name: str = "c1", **fields: object) -> list[str]:
    """Run a container to its end; return its output."""
    out = _output(shim)
    await shim.run(name, stdout=f"file://{out}", stderr=f"file://{out}", **fields)
    await shim.reap(name)
    return out.read_text(encoding="utf-8").split()


def _output(shim: ShimByHand) -> Path:
    path = Path(shim.directory, "out")
    path.write_text("")
    return path


def _largest(root: Path) -> dict[str, tuple[int, int]]:
    """Return the inode and the disk usage of each large file."""
    found = {}
    for path in root.rglob("*"):
        status = path.lstat()
        if status.st_size > 32 << 20:
            found[str(path)] = (status.st_ino, status.st_blocks)
    return found
