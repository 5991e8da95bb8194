"""A file system whose server hangs is detected without access to it, and does not block."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from shim.errors import MountFailed, UnmountFailed
from shim.mountinfo import may_hang, mount_points_below
from shim.pod import creation as module
from shim.pod.creation import Rootfs
from tests.harness import loop_backend
from tests.harness.fuse import FILE, fuse

_PLAIN = ["index=off", "upperdir=/a", "workdir=/b", "lowerdir=/c:/d"]


def test_what_needs_a_served_file_system_is_recognised_without_touching_it(tmp_path: Path) -> None:
    with fuse(str(tmp_path / "fuse")) as server:
        server.hang()
        stuck = server.mount_point
        (tmp_path / "absolute").symlink_to(f"{stuck}/layer")
        (tmp_path / "relative").symlink_to("absolute/../other")
        (tmp_path / "round").symlink_to("round")
        for mount in (
            ("bind", stuck, "", ["bind"]),
            ("bind", f"{tmp_path}/../{tmp_path.name}//fuse/./layer", "", ["bind"]),
            ("bind", f"{tmp_path}/relative", "", ["bind"]),
            ("ext4", f"{stuck}/image", "", ["loop"]),
            ("overlay", "overlay", "", [*_PLAIN[:3], f"lowerdir=/c:{tmp_path}/absolute/x"]),
            ("nfs4", "server:/share", "", []),
            ("fuse.sshfs", "server:/share", "", []),
        ):
            assert may_hang([("tmpfs", "tmpfs", "", []), mount]), mount
        for mount in (
            ("bind", str(tmp_path), "", ["rbind"]),
            ("bind", f"{stuck}-other", "", ["bind"]),
            ("bind", f"{tmp_path}/round", "", ["bind"]),
            ("overlay", "overlay", "", _PLAIN),
        ):
            assert not may_hang([mount]), mount
        assert not server.asked.is_set()


@pytest.fixture
def anyio_backend() -> str:
    """Run on the shim's loop."""
    loop_backend.register()
    return loop_backend.OURS


# A mount namespace that another process creates meanwhile has this mount, too; then umount(2)
# does not wait.
@pytest.mark.serial
@pytest.mark.anyio
async def test_a_mount_that_comes_late_is_undone_and_an_unmount_that_hangs_is_waited_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, path = str(tmp_path / "ext4"), str(tmp_path / "rootfs")
    subprocess.run(["mkfs.ext4", "-q", image, "16m"], check=True)  # noqa: ASYNC221 - short
    monkeypatch.setattr(module, "MOUNTING", 0.3)
    monkeypatch.setattr(module, "UNMOUNTING", 0.3)
    with fuse(str(tmp_path / "fuse"), image) as server:
        async with anyio.create_task_group() as tasks:
            context = cast("Any", SimpleNamespace(tasks=tasks))
            mount = ("ext4", f"{server.mount_point}/{FILE}", "", ["loop"])
            server.hang()
            rootfs = Rootfs(context, path)
            with pytest.raises(MountFailed, match="had not returned after"):
                await rootfs.mount([mount])
            await rootfs.unmount()  # nothing is mounted yet
            server.go_on()
        # Unmounted once the thread has ended.
        assert mount_points_below(path) == []
        async with anyio.create_task_group() as tasks:
            rootfs = Rootfs(cast("Any", SimpleNamespace(tasks=tasks)), path)
            monkeypatch.setattr(module, "MOUNTING", 30)
            await rootfs.mount([mount])
            (tmp_path / "rootfs" / "written").write_text("x")
            server.hang()
            for _ in range(2):
                with pytest.raises(UnmountFailed, match="had not returned after"):
                    await rootfs.unmount()
            server.go_on()
            monkeypatch.setattr(module, "UNMOUNTING", 30)
            await rootfs.unmount()
            assert mount_points_below(path) == []
