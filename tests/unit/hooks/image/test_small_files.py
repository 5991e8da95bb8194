"""Where a plan's small files and directories of links go, for every kind of image."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from hooks.image.rootfs_errors import DirectoryInTheWay, PathRefused
from hooks.plan import File, LinkDirectory, Mount, Plan, ProcFile
from tests.unit.hooks.image.images import link, put, put_in, tree

PROFILE = "/etc/nvidia/rc.d/10-container.conf"
BY_PATH = "/dev/dri/by-path"
LINKS = (("pci-0000:07:00.0-card", "../card0"), ("pci-0000:07:00.0-render", "../renderD128"))
PLAN = Plan(
    files=(File(PROFILE, b"profile", reason="profile"),),
    link_directories=(LinkDirectory(BY_PATH, LINKS, "by path"),),
    proc_files=(ProcFile("/proc/driver/nvidia/params", b"ModifyDeviceFiles: 0\n", "no nodes"),),
)
DEV = {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid"]}


@pytest.fixture
def read_only(root: str) -> Iterator[str]:
    put(root, PROFILE, b"of the image")
    os.makedirs(f"{root}/opt/links")
    subprocess.run(["mount", "--bind", "-o", "ro", root, root], check=True)
    yield root
    subprocess.run(["umount", root], check=True)


def test_file_is_written_and_links_are_mounted_on_a_tmpfs(root: str) -> None:
    placed = put_in(root, PLAN, [DEV])
    with open(root + PROFILE, "rb") as file:
        assert file.read() == b"profile"
    assert stat.S_IMODE(os.stat(root + PROFILE).st_mode) == 0o644
    staged = f"{root}-staging/file-0"
    assert placed.mounts == (Mount(staged, BY_PATH, reason="by path"),)
    assert {name: os.readlink(f"{staged}/{name}") for name in os.listdir(staged)} == dict(LINKS)
    assert placed.omitted == ()
    assert not os.path.lexists(f"{root}/dev/dri")


def test_content_for_procfs_is_staged_and_nothing_is_mounted_for_it(root: str) -> None:
    placed = put_in(root, PLAN, [DEV])
    ((path, source),) = placed.proc_files
    assert path == "/proc/driver/nvidia/params"
    with open(source, "rb") as file:
        assert file.read() == b"ModifyDeviceFiles: 0\n"
    assert not [mount for mount in placed.mounts if "proc" in mount.destination]


def test_second_placement_changes_nothing(root: str) -> None:
    first = put_in(root, PLAN, [DEV])
    before = tree(root)
    second = put_in(root, PLAN, [DEV])
    assert (second.written, second.mounts) == ((), first.mounts)
    assert tree(root) == before


def test_plan_without_such_files_makes_no_staging_directory(root: str) -> None:
    put_in(root, Plan(), [DEV])
    assert not os.path.lexists(f"{root}-staging")


def test_links_outside_of_any_tmpfs_are_mounted_on_a_directory_of_the_image(root: str) -> None:
    plan = Plan(link_directories=(LinkDirectory("/opt/links", LINKS),))
    (mount,) = put_in(root, plan, [DEV]).mounts
    assert mount.destination == "/opt/links"
    assert os.listdir(f"{root}/opt/links") == []


@pytest.mark.parametrize(
    "mount",
    [
        {"destination": "/dev", "type": "bind", "source": "/dev", "options": ["rbind"]},
        {**DEV, "options": ["ro"]},
    ],
)
def test_nothing_is_put_into_somebody_elses_volume(root: str, mount: dict[str, Any]) -> None:
    volume = {"destination": "/etc/nvidia", "type": "bind", "source": "/srv"}
    placed = put_in(root, PLAN, (mount, volume))
    assert placed.mounts == ()
    assert set(placed.omitted) == {PROFILE, BY_PATH}
    assert not os.path.lexists(root + PROFILE)


def test_volume_over_a_tmpfs_counts_and_not_the_tmpfs(root: str) -> None:
    volume = {"destination": "/dev/dri", "type": "bind", "source": "/srv"}
    assert put_in(root, PLAN, (DEV, volume)).omitted == (BY_PATH,)


def test_tmpfs_that_is_covered_later_does_not_count(root: str) -> None:
    volume = {"destination": "/dev", "type": "bind", "source": "/srv"}
    below = {**DEV, "destination": "/dev/dri"}
    assert put_in(root, PLAN, (below, volume)).omitted == (BY_PATH,)
    assert put_in(root, PLAN, (volume, below)).omitted == ()


def test_file_on_a_tmpfs_is_mounted(root: str) -> None:
    tmpfs = {"destination": "/etc/nvidia", "type": "tmpfs", "source": "tmpfs"}
    placed = put_in(root, PLAN, (DEV, tmpfs))
    assert PROFILE in {mount.destination for mount in placed.mounts}
    assert not os.path.lexists(root + PROFILE)


def test_link_to_nowhere_on_the_way_leaves_no_room(root: str) -> None:
    link(root, "/etc/nvidia", "/nowhere")
    assert put_in(root, PLAN, [DEV]).omitted == (PROFILE,)


def test_image_that_takes_no_writes_gets_all_by_mounts(read_only: str) -> None:
    before = tree(read_only)
    plan = Plan(
        files=(*PLAN.files, File("/etc/not-there", b"")),
        link_directories=(
            *PLAN.link_directories,
            LinkDirectory("/opt/links", LINKS),
            LinkDirectory("/opt/other", LINKS),
        ),
    )
    placed = put_in(read_only, plan, [DEV])
    assert [mount.destination for mount in placed.mounts] == [PROFILE, BY_PATH, "/opt/links"]
    assert placed.omitted == ("/etc/not-there", "/opt/other")
    assert tree(read_only) == before


def test_failure_takes_everything_back(root: str) -> None:
    os.makedirs(f"{root}{PROFILE}/in the way")
    before = tree(root)
    plan = Plan(files=(File("/etc/first", b"x"), *PLAN.files))
    with pytest.raises(DirectoryInTheWay):
        put_in(root, plan, [DEV])
    assert tree(root) == before


@pytest.mark.parametrize(
    "plan",
    [
        Plan(files=(File("/etc/../x", b""),)),
        Plan(files=(File("/", b""),)),
        Plan(proc_files=(ProcFile("relative", b""),)),
        Plan(link_directories=(LinkDirectory("/dev/x", (("a/b", "c"),)),)),
        Plan(link_directories=(LinkDirectory("/dev/x", (("..", "c"),)),)),
        Plan(link_directories=(LinkDirectory("/dev/x", (("a", ""),)),)),
        Plan(link_directories=(LinkDirectory("/dev/x", (("a", "b\0"),)),)),
    ],
)
def test_names_that_would_lead_elsewhere_are_refused(root: str, plan: Plan) -> None:
    before = tree(root)
    with pytest.raises(PathRefused):
        put_in(root, plan, [DEV])
    assert tree(root) == before
