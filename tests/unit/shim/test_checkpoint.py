"""Calls of a runtime that uses CRIU: their arguments, and what failed ones leave."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import pytest

from api.errors import NvshimError
from shim import syscalls
from shim.checkpoint import criu, images
from shim.checkpoint.checkpoint import Calls, Saved
from shim.checkpoint.errors import (
    CheckpointFailed,
    CheckpointPathUnusable,
    CheckpointUnusable,
    CriuNotFound,
    CriuUnsupportedByRuntime,
    RestoreFailed,
)
from shim.children import Reaper
from shim.runtime.options import RuntimeOptions
from shim.runtime.runtime import LowLevelRuntime
from shim.stdio import ChildStdio
from tests.harness.raising import Kind, raises

pytestmark = pytest.mark.anyio

FILES: Final = {"file[1b:2]": 1}

# $7 is the verb; --image-path and --work-path, or the flags of restore, follow it.
TELL: Final = """
here=$(dirname "$0")
echo "$@" >"$here/argv"
cp "$CRIU_CONFIG_FILE" "$here/config" 2>/dev/null
command -v criu >"$here/criu" 2>/dev/null
readlink -f "$(command -v criu)" >"$here/criu"
"""
FAIL: Final = f"""{TELL}
[ "$2" = --help ] && exit 0
while [ "$1" != --image-path ]; do shift; done
[ "$2" = "$here/saved" ] && echo >"$2/half.img"
echo '(00.1) Error (criu/x.c:1): something is in the way' >"$4/dump.log"
cp "$4/dump.log" "$4/restore.log"
exit 1
"""


class Container:
    """A container in a bundle, whose runtime is a shell script."""

    def __init__(self, reaper: Reaper, directory: Path) -> None:
        self.directory = directory
        self.bundle = directory / "bundle"
        self.bundle.mkdir()
        self.saved = directory / "saved"
        self._reaper = reaper

    def calls(self, script: str, **options: Any) -> Calls:
        binary = self.directory / "runc"
        binary.write_text(f"#!/bin/sh\n{script}\n")
        binary.chmod(0o755)
        told = RuntimeOptions(binary_name=str(binary), **options)
        bundle = str(self.bundle)
        runtime = LowLevelRuntime(
            self._reaper, told, container_id="c1", root="/run/r", bundle=bundle
        )
        return Calls(runtime, told, "c1", bundle)

    def checkpoint(self) -> Saved:
        """Make an existing checkpoint."""
        before = self.directory / "before"
        before.mkdir()
        (before / images.INVENTORY).write_bytes(bytes.fromhex("16313158"))
        (before / images.DESCRIPTORS).write_text("[]")
        record = images.Record(FILES, images.Switches(open_tcp=True))
        (before / images.RECORD).write_bytes(record.encode())
        return Saved(str(before), "")

    def told(self, what: str) -> str:
        """Return the arguments of the runtime."""
        return (self.directory / what).read_text()


@pytest.fixture
def container(reaper: Reaper, tmp_path: Path) -> Container:
    return Container(reaper, tmp_path)


async def test_saving_tells_what_the_container_has_of_outside_and_remembers_it(
    container: Container,
) -> None:
    # As with containerd: the bundle is on a tmpfs, the log grows on disk.
    disk = container.directory / "disk"
    disk.mkdir()
    (container.bundle / "work").symlink_to(disk)
    options = criu.CheckpointOptions(switches=images.Switches(file_locks=True))
    await container.calls(TELL).save(str(container.saved), options, FILES)
    assert container.told("config") == "external file[1b:2]\n"
    words = f"--work-path {container.bundle}/work/criu-work --leave-running"
    assert words in container.told("argv")
    record = images.Record.decode((container.saved / images.RECORD).read_bytes())
    assert record == images.Record(FILES, options.switches)
    assert os.listdir(container.bundle) == ["work"]
    assert os.listdir(disk) == []


async def test_restoring_hands_the_new_stdio_over_and_allows_what_was_allowed(
    container: Container,
) -> None:
    log = f"{container.directory}/log"
    saved = container.checkpoint()
    calls = container.calls(TELL, criu_work_path=log)
    await calls.restore(saved, ChildStdio(), pid_file="/p")
    assert container.told("config") == "inherit-fd fd[1]:file[1b:2]\n"
    words = f"--image-path {saved.directory} --work-path {log} --tcp-established c1\n"
    assert container.told("argv").endswith(words)
    assert os.listdir(container.bundle) == []


async def test_criu_that_the_options_name_is_the_one_that_is_found(container: Container) -> None:
    other = container.directory / "criu-4"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    calls = container.calls(TELL, criu_path=str(other))
    await calls.save(str(container.saved), criu.CheckpointOptions(), {})
    assert container.told("criu") == f"{other}\n"
    assert os.listdir(container.bundle) == []


WHOLE: Final = """
while [ "$1" != --image-path ]; do shift; done
echo >"$2/core-1.img"; echo '(00.2) Dumping finished successfully' >"$4/dump.log"; exit 1
"""
THEIRS: Final = 'echo >"${0%/*}/saved/theirs"; exit 1'
WAY: Final = "CRIU: something is in the way"
# The runtime's script, the error, and the files left in the bundle and of the checkpoint.
FAILURES: Final[dict[str, tuple[str, Kind[NvshimError], str, list[str], list[str] | None]]] = {
    "failed": (FAIL, CheckpointFailed, WAY, ["criu-dump.log"], None),
    "failed in a directory that was there": (
        FAIL, CheckpointFailed, WAY, ["criu-dump.log"], ["mine"],
    ),
    "failed after it was whole": (
        WHOLE, CheckpointFailed, "c1", ["criu-dump.log"], [images.RECORD, "core-1.img"],
    ),
    "no such verb": ("exit 1", CriuUnsupportedByRuntime, "has no command checkpoint", [], None),
    "what others have written meanwhile": (
        THEIRS, CriuUnsupportedByRuntime, "checkpoint", [], ["theirs"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
async def test_failed_checkpoint_leaves_its_log_and_nothing_of_its_own(
    container: Container, name: str
) -> None:
    script, error, words, in_bundle, in_saved = FAILURES[name]
    if in_saved == ["mine"]:
        container.saved.mkdir()
        (container.saved / "mine").touch()
    with raises(error, match=words) as caught:
        await container.calls(script).save(
            str(container.saved), criu.CheckpointOptions(exit=True), FILES
        )
    assert os.listdir(container.bundle) == in_bundle
    left = sorted(os.listdir(container.saved)) if container.saved.exists() else None
    assert left == in_saved
    if words == WAY:
        assert f"Read {container.bundle}/criu-dump.log" in str(caught.value)
        assert "in the way" in (container.bundle / "criu-dump.log").read_text()


async def test_a_whole_checkpoint_is_kept_though_the_place_of_its_call_cannot_be_removed(
    container: Container,
) -> None:
    """The container may have ended with it."""
    script = """
while [ "$1" != --image-path ]; do shift; done
echo >"$2/core-1.img"; mkdir "$4/busy"; mount -t tmpfs tmpfs "$4/busy"
"""
    busy = container.bundle / "criu-work/busy"
    try:
        with pytest.raises(OSError, match="busy"):
            await container.calls(script).save(
                str(container.saved), criu.CheckpointOptions(exit=True), FILES
            )
    finally:
        syscalls.umount(str(busy), 0)
    assert sorted(os.listdir(container.saved)) == [images.RECORD, "core-1.img"]


async def test_failed_restore_leaves_its_log_and_the_checkpoint(container: Container) -> None:
    saved = container.checkpoint()
    before = sorted(os.listdir(saved.directory))
    with raises(RestoreFailed, match=WAY):
        await container.calls(FAIL).restore(saved, ChildStdio(), pid_file="/p")
    assert os.listdir(container.bundle) == ["criu-restore.log"]
    assert sorted(os.listdir(saved.directory)) == before


async def test_log_of_an_earlier_call_is_not_taken_for_this_ones(container: Container) -> None:
    work = container.directory / "work"
    work.mkdir()
    (work / "dump.log").write_text("(00.1) Error (criu/x.c:1): of yesterday\n")
    options = criu.CheckpointOptions(work_path=str(work))
    calls = container.calls('[ "$2" = --help ] || exit 1')
    with raises(CheckpointFailed) as caught:
        await calls.save(str(container.saved), options, {})
    assert "yesterday" not in str(caught.value)


async def test_criu_that_is_not_where_the_options_say_is_named(container: Container) -> None:
    calls = container.calls(TELL, criu_path="/no/criu")
    with raises(CriuNotFound, match="/no/criu"):
        await calls.save(str(container.saved), criu.CheckpointOptions(), {})
    assert not container.saved.exists()
    assert os.listdir(container.bundle) == []


@pytest.mark.parametrize("path", ["relative", "", "/etc/passwd", "/no/such/parent/saved"])
async def test_checkpoint_needs_a_directory(container: Container, path: str) -> None:
    with raises(CheckpointPathUnusable):
        await container.calls(TELL).save(path, criu.CheckpointOptions(), {})


def test_what_is_to_be_restored_has_to_be_a_checkpoint(tmp_path: Path) -> None:
    with raises(CheckpointUnusable):
        Saved(str(tmp_path), "")
