"""The mounts that containerd's snapshotters request in addition to plain ones."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import anyio
import pytest

from api.errors import Status
from api.ttrpc import RemoteError
from integration.simulated import SimulatedNode
from integration.timeouts import PATIENCE
from tests.harness.containerds import containerd_with_images, nothing_left
from tests.harness.releases import UNSTABLE, of_releases
from tests.harness.runtime import OURS, Runtime, is_alive
from tests.harness.shim import ShimByHand, StartShim, content_of, wait_for_file
from tools.containerd import PrivateContainerd
from tools.cri.plugin import to_toml
from tools.images import BUSYBOX, GLIBC, busybox, glibc, write_archive
from tools.parts import Parts

MAPPING: Final = "0:100000:65536"
MAPPED: Final = (f"uidmap={MAPPING}", f"gidmap={MAPPING}")
SLOW: Final = ("--uidmap", MAPPING, "--gidmap", MAPPING)
GPUS: Final = ("--env", "NVIDIA_VISIBLE_DEVICES=all", "--env", "NVIDIA_DRIVER_CAPABILITIES=all")
NEEDS_LOOP: Final = pytest.mark.skipif(
    not os.path.exists("/dev/loop-control"), reason="no loop devices: modprobe loop"
)


def in_user_namespace(shim: ShimByHand) -> None:
    """Run the container in a user namespace, as containerd writes it."""
    spec = shim.spec("c1")
    ids = [{"containerID": 0, "hostID": 100_000, "size": 65_536}]
    spec["linux"]["namespaces"].append({"type": "user"})
    spec["linux"].update(uidMappings=ids, gidMappings=ids)
    shim.write_spec("c1", spec)
    for directory in (shim.directory, f"{shim.directory}/c1"):
        os.chmod(directory, 0o711)


def snapshot(shim: ShimByHand, *, layers: int, owner: int) -> list[str]:
    """Create a snapshot with the bundle's image as lowest layer; return an overlay's options."""
    names = [f"{shim.directory}/snapshots/{number}/fs" for number in range(layers)]
    for number, name in enumerate(names[:-1]):
        os.makedirs(name)
        with open(f"{name}/from-{number}", "w"):
            pass
    os.makedirs(os.path.dirname(names[-1]))
    os.rename(f"{shim.directory}/c1/rootfs", names[-1])
    os.mkdir(f"{shim.directory}/c1/rootfs")
    for name in ("fs", "work"):
        os.makedirs(f"{shim.directory}/snapshots/new/{name}")
    upper = f"{shim.directory}/snapshots/new/fs"
    os.chown(upper, owner, owner)
    work = f"{shim.directory}/snapshots/new/work"
    lower = ":".join(names)
    return ["index=off", f"workdir={work}", f"upperdir={upper}", f"lowerdir={lower}"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("binary", "layers"), [("runc", 1), ("runc", 3), ("runc", 120), ("crun", 3)]
)
async def test_layers_of_an_image_have_the_ids_of_the_user_namespace(
    start_shim: StartShim, binary: str, layers: int
) -> None:
    script = (
        "{ ls -d /from-* | wc -l; stat -c %u:%g / /bin/sh; } > /part; mv /part /seen; sleep 1000"
    )
    async with start_shim("c1", "sh", "-c", script, for_crun=binary == "crun") as shim:
        in_user_namespace(shim)
        options = snapshot(shim, layers=layers, owner=100_000)
        mount = {"type": "overlay", "source": "overlay", "options": [*MAPPED, *options]}
        await shim.run("c1", rootfs=[mount], options=shim.options(binary))
        upper = f"{shim.directory}/snapshots/new/fs"
        seen = wait_for_file(f"{upper}/seen").split()
        # On the host the container owns what it created, and the image is unchanged.
        assert os.stat(f"{upper}/seen").st_uid == 100_000
        assert os.stat(f"{shim.directory}/snapshots/{layers - 1}/fs/bin/sh").st_uid == 0
        assert seen == [str(layers - 1), "0:0", "0:0"]


@pytest.mark.anyio
@pytest.mark.parametrize("flag", ["rw", "ro"])
async def test_bind_mount_has_the_ids_of_the_user_namespace(
    start_shim: StartShim, flag: str
) -> None:
    """For a snapshot without layers, or a view of a single one."""
    script = "stat -c %u:%g / /bin/sh; touch /new && stat -c %u /new; true"
    async with start_shim("c1", "sh", "-c", script) as shim:
        in_user_namespace(shim)
        image = f"{shim.directory}/image"
        os.rename(f"{shim.directory}/c1/rootfs", image)
        os.mkdir(f"{shim.directory}/c1/rootfs")
        mount = {"type": "bind", "source": image, "options": [*MAPPED, flag, "rbind"]}
        out = _output(shim)
        await shim.run("c1", rootfs=[mount], stdout=f"file://{out}")
        assert await shim.reap("c1") == 0
        assert content_of(out).split() == [b"0:0", b"0:0", *([b"0"] if flag == "rw" else [])]
        assert os.stat(image).st_uid == 0
        assert os.path.exists(f"{image}/new") == (flag == "rw")


@pytest.mark.anyio
async def test_nothing_of_mapped_layers_is_left_of_a_killed_shim(shim: ShimByHand) -> None:
    in_user_namespace(shim)
    options = snapshot(shim, layers=3, owner=100_000)
    mount = {"type": "overlay", "source": "overlay", "options": [*MAPPED, *options]}
    init = await shim.run("c1", rootfs=[mount])
    assert _mounts(shim.directory) == [f"{shim.directory}/c1/rootfs"]
    os.kill(shim.pid, signal.SIGKILL)
    await shim.until_gone()
    shim.delete_verb("c1")
    assert not is_alive(init)


IMPOSSIBLE: Final = (
    ([f"uidmap={MAPPING}"], Status.INVALID_ARGUMENT, "no gidmap with it"),
    ([f"gidmap={MAPPING}"], Status.INVALID_ARGUMENT, "no uidmap with it"),
    (["uidmap=0:1", f"gidmap={MAPPING}"], Status.INVALID_ARGUMENT, "three numbers"),
    ([f"uidmap={MAPPING},-1:2:3", f"gidmap={MAPPING}"], Status.INVALID_ARGUMENT, "three"),
    (["uidmap=0:0:0", "gidmap=0:0:0"], Status.FAILED_PRECONDITION, "invalid argument"),
    (["X-containerd.mkdir.path=/x"], Status.INVALID_ARGUMENT, "does not implement"),
    (["X-containerd.dmverity=/x"], Status.INVALID_ARGUMENT, "does not implement"),
)


@pytest.mark.anyio
async def test_options_that_cannot_be_are_refused_in_a_line_and_leave_nothing(
    start_shim: StartShim,
) -> None:
    async with start_shim("c1", "true") as shim:
        image = f"{shim.directory}/image"
        os.rename(f"{shim.directory}/c1/rootfs", image)
        os.mkdir(f"{shim.directory}/c1/rootfs")
        for options, status, found in IMPOSSIBLE:
            mount = {"type": "bind", "source": image, "options": ["rbind", *options]}
            assert found in await _refused(shim, status, rootfs=[mount])
            left = [f"socket {shim.socket_path}", f"process {shim.pid}"]
            assert shim.leftovers() == left, options


@NEEDS_LOOP
@pytest.mark.anyio
@pytest.mark.parametrize("flags", [(), ("ro",), ("direct-io",), MAPPED], ids="".join)
async def test_file_with_a_file_system_is_the_root(
    start_shim: StartShim, flags: tuple[str, ...]
) -> None:
    """As the blockfile snapshotter requests it."""
    async with start_shim("c1", "sh", "-c", "stat -c %u / /bin/sh; touch /new; true") as shim:
        if flags == MAPPED:
            in_user_namespace(shim)
        file = ext4_of(shim)
        out = _output(shim)
        mount = {"type": "ext4", "source": file, "options": ["loop", *flags]}
        await shim.run("c1", rootfs=[mount], stdout=f"file://{out}")
        assert await shim.reap("c1") == 0
        assert content_of(out).split() == [b"0", b"0"]
        # Only after the unmount does the file have all changes.
        await _no_loop_of(file)
        assert _has_new(file) == (flags != ("ro",))


@NEEDS_LOOP
@pytest.mark.anyio
async def test_file_that_is_no_file_system_leaves_no_loop_device(start_shim: StartShim) -> None:
    async with start_shim("c1", "true") as shim:
        for name, size in (("none", None), ("empty", 0), ("nothing", 1 << 20)):
            path = f"{shim.directory}/{name}"
            if size is not None:
                Path(path).touch()
                os.truncate(path, size)
            mount = {"type": "ext4", "source": path, "options": ["loop"]}
            said = await _refused(shim, Status.FAILED_PRECONDITION, rootfs=[mount])
            assert path in said
            await _no_loop_of(path)
        assert shim.leftovers() == [f"socket {shim.socket_path}", f"process {shim.pid}"]


@NEEDS_LOOP
@pytest.mark.anyio
async def test_loop_device_ends_with_what_is_left_of_a_killed_shim(shim: ShimByHand) -> None:
    file = ext4_of(shim)
    mount = {"type": "ext4", "source": file, "options": ["loop"]}
    await shim.run("c1", rootfs=[mount])
    assert len(_loops_of(file)) == 1
    os.kill(shim.pid, signal.SIGKILL)
    await shim.until_gone()
    shim.delete_verb("c1")
    assert shim.leftovers() == []
    await _no_loop_of(file)


# -- through containerd --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def newest(shim_directory: str, shim_config: str) -> Iterator[PrivateContainerd]:
    """Return a containerd whose overlayfs snapshotter leaves id mapping to the kernel."""
    with containerd_with_images(
        Parts.of_release(UNSTABLE),
        [busybox(), glibc()],
        shim_directory=shim_directory,
        shim_config=shim_config,
    ) as containerd:
        yield containerd


@pytest.fixture
def mapping(newest: PrivateContainerd) -> Iterator[Runtime]:
    """Return the runtime in it."""
    with nothing_left(newest):
        runtime = Runtime(newest, OURS)
        yield runtime
        runtime.close()


@pytest.fixture
def on_gpus(two_gpus: SimulatedNode, configure: Callable[..., None]) -> None:
    """Configure a node with two GPUs."""
    configure(node=two_gpus)


@pytest.mark.newest
@pytest.mark.parametrize("image", [BUSYBOX, GLIBC])
def test_containerd_has_ids_mapped(mapping: Runtime, image: str) -> None:
    flags = (*SLOW, "--remap-labels")
    done = mapping.run("sh", "-c", "stat -c %u:%g / /bin/sh", image=image, flags=flags)
    assert (done.stdout.split(), done.code) == (["0:0", "0:0"], 0), done.stderr


@pytest.mark.newest
@pytest.mark.usefixtures("on_gpus")
@pytest.mark.parametrize("more", [(), ("--read-only",)], ids=["", "read-only"])
def test_gpus_are_in_a_container_whose_ids_the_kernel_maps(
    mapping: Runtime, more: tuple[str, ...]
) -> None:
    _sees_its_gpus(mapping, (*SLOW, "--remap-labels", *more))


@pytest.mark.usefixtures("on_gpus")
def test_gpus_are_in_a_container_whose_owners_containerd_has_changed(runtime: Runtime) -> None:
    if not runtime.is_ours:
        pytest.skip("containerd's own shim knows nothing of GPUs")
    if runtime.maps_no_ids:
        pytest.skip("containerd 2 takes any options for runc's where ids are mapped")
    _sees_its_gpus(runtime, SLOW)


def _sees_its_gpus(runtime: Runtime, flags: tuple[str, ...]) -> None:
    script = (
        "cat /proc/self/uid_map; nvidia-smi -L; test -c /dev/nvidia0 && test -w /dev/nvidia0;"
        " stat -c %u:%g /etc/ld.so.cache /usr/lib/*/libcuda.so.1 /dev/dri; test -r /dev/dri/by-path"
    )
    done = runtime.run("sh", "-c", script, image=GLIBC, flags=(*flags, *GPUS))
    assert done.code == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.split() == ["0", "100000", "65536"]
    assert [line.partition(" (UUID")[0] for line in rest[:2]] == [
        "GPU 0: NVIDIA H100 80GB HBM3",
        "GPU 1: NVIDIA H100 80GB HBM3",
    ]
    assert rest[2:] == ["0:0"] * 3


@NEEDS_LOOP
@pytest.mark.parametrize("release", of_releases("trixie", UNSTABLE))
def test_container_of_the_blockfile_snapshotter_runs(
    shim_directory: str, shim_config: str, release: str
) -> None:
    with PrivateContainerd(
        shim_directory=shim_directory,
        shim_config=shim_config,
        parts=Parts.of_release(release),
        amend=_enable_blockfile,
    ) as containerd:
        archive = write_archive(f"{containerd.directory}/images.tar", [busybox()])
        containerd.ctr("images", "import", archive)
        with nothing_left(containerd):
            runtime = Runtime(containerd, OURS)
            script = "grep -c ' / / .* - ext4 ' /proc/self/mountinfo; touch /new; ls /new"
            flags = ("--snapshotter", "blockfile")
            done = runtime.run("sh", "-c", script, flags=flags)
            assert (done.stdout.split(), done.code) == (["1", "/new"], 0), done.stderr


def _enable_blockfile(path: str) -> None:
    """Enable containerd's blockfile snapshotter in a configuration, with a template file."""
    scratch = f"{os.path.dirname(path)}/scratch"
    if not os.path.exists(scratch):
        subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", scratch, "16m"], check=True)
    plugin = "io.containerd.snapshotter.v1.blockfile"
    config = Path(path).read_text(encoding="utf-8")
    assert f'"{plugin}", ' in config
    table = {"scratch_file": scratch, "fs_type": "ext4"}
    config = config.replace(f'"{plugin}", ', "") + "\n" + to_toml(table, "plugins", plugin) + "\n"
    Path(path).write_text(config, encoding="utf-8")


# -- helpers -------------------------------------------------------------------------------------


async def _refused(shim: ShimByHand, status: int, **fields: Any) -> str:
    with pytest.raises(RemoteError) as caught:
        await shim.create("c1", **fields)
    said = str(caught.value)
    assert "\n" not in said
    assert re.search(r"\. [A-Z]", said)
    assert caught.value.status == status
    return said


def ext4_of(shim: ShimByHand) -> str:
    """Create an ext4 file system with the bundle's image in a file; return its path."""
    file = f"{shim.directory}/image.ext4"
    root = f"{shim.directory}/c1/rootfs"
    subprocess.run(["mkfs.ext4", "-q", "-d", root, file, "32m"], check=True)
    os.rename(root, f"{shim.directory}/image")
    os.mkdir(root)
    return file


def _has_new(file: str) -> bool:
    """Whether a file system in a file has a file /new."""
    argv = ["debugfs", "-R", "stat /new", file]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return "Inode:" in done.stdout


def _output(shim: ShimByHand) -> str:
    path = Path(shim.directory, "out")
    path.touch()
    return str(path)


def _loops_of(file: str) -> list[str]:
    done = subprocess.run(
        ["losetup", "--noheadings", "--output", "NAME", "--associated", file],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.split()


async def _no_loop_of(file: str) -> None:
    """Wait until no device uses a file: udev may have a new device open for a moment."""
    with anyio.fail_after(30 * PATIENCE):
        while _loops_of(file):  # noqa: ASYNC110 - seen from outside
            await anyio.sleep(0.01)


def _mounts(directory: str) -> list[str]:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        points = [line.split()[4] for line in file]
    return [point for point in points if point.startswith(f"{directory}/")]
