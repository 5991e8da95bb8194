"""Calls of a runtime that calls CRIU: what they find, and what is left of those that fail."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

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

pytestmark = pytest.mark.anyio

FILES: Final = {"file[1b:2]": 1}

# $7 is the verb; --image-path and --work-path follow it, or the flags of restore.
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


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    return bundle


def _calls(
    reaper: Reaper, bundle: Path, script: str, options: RuntimeOptions | None = None
) -> Calls:
    binary = bundle.parent / "runc"
    binary.write_text(f"#!/bin/sh\n{script}\n")
    binary.chmod(0o755)
    options = replace(options or RuntimeOptions(), binary_name=str(binary))
    runtime = LowLevelRuntime(reaper, options, container_id="c1", root="/run/r", bundle=str(bundle))
    return Calls(runtime, options, "c1", str(bundle))


def _saved(directory: Path) -> Saved:
    directory.mkdir()
    (directory / images.INVENTORY).write_bytes(bytes.fromhex("16313158"))
    (directory / images.DESCRIPTORS).write_text("[]")
    record = images.Record(FILES, images.Switches(open_tcp=True))
    (directory / images.RECORD).write_bytes(record.encode())
    return Saved(str(directory), "")


def _told(directory: Path, what: str) -> str:
    return (directory / what).read_text()


async def test_saving_tells_what_the_container_has_of_outside_and_remembers_it(
    reaper: Reaper, bundle: Path, tmp_path: Path
) -> None:
    # As containerd does it: the bundle is in memory, the log grows on disk.
    (tmp_path / "disk").mkdir()
    (bundle / "work").symlink_to(tmp_path / "disk")
    path = tmp_path / "saved"
    options = criu.CheckpointOptions(switches=images.Switches(file_locks=True))
    await _calls(reaper, bundle, TELL).save(str(path), options, FILES)
    assert _told(tmp_path, "config") == "external file[1b:2]\n"
    assert f"--work-path {bundle}/work/criu-work --leave-running" in _told(tmp_path, "argv")
    record = images.Record.decode((path / images.RECORD).read_bytes())
    assert record == images.Record(FILES, options.switches)
    assert os.listdir(bundle) == ["work"]
    assert os.listdir(tmp_path / "disk") == []


async def test_restoring_hands_the_new_stdio_over_and_allows_what_was_allowed(
    reaper: Reaper, bundle: Path, tmp_path: Path
) -> None:
    options = RuntimeOptions(criu_work_path=str(tmp_path / "log"))
    saved = _saved(tmp_path / "saved")
    calls = _calls(reaper, bundle, TELL, options)
    await calls.restore(saved, ChildStdio(), pid_file="/p")
    assert _told(tmp_path, "config") == "inherit-fd fd[1]:file[1b:2]\n"
    words = f"--image-path {saved.directory} --work-path {tmp_path}/log --tcp-established c1\n"
    assert _told(tmp_path, "argv").endswith(words)
    assert os.listdir(bundle) == []


async def test_criu_that_the_options_name_is_the_one_that_is_found(
    reaper: Reaper, bundle: Path, tmp_path: Path
) -> None:
    other = tmp_path / "criu-4"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    calls = _calls(reaper, bundle, TELL, RuntimeOptions(criu_path=str(other)))
    await calls.save(str(tmp_path / "saved"), criu.CheckpointOptions(), {})
    assert _told(tmp_path, "criu") == f"{other}\n"
    assert os.listdir(bundle) == []


async def test_criu_that_the_options_name_and_that_is_not_there_is_named(
    reaper: Reaper, bundle: Path, tmp_path: Path
) -> None:
    calls = _calls(reaper, bundle, TELL, RuntimeOptions(criu_path="/no/criu"))
    with pytest.raises(CriuNotFound, match="/no/criu"):
        await calls.save(str(tmp_path / "saved"), criu.CheckpointOptions(), {})
    assert not (tmp_path / "saved").exists()
    assert os.listdir(bundle) == []


@pytest.mark.parametrize("there", [False, True])
async def test_failed_checkpoint_leaves_its_log_and_nothing_else(
    reaper: Reaper, bundle: Path, tmp_path: Path, *, there: bool
) -> None:
    path = tmp_path / "saved"
    if there:
        path.mkdir()
        (path / "mine").touch()
    with pytest.raises(CheckpointFailed, match="CRIU: something is in the way") as caught:
        await _calls(reaper, bundle, FAIL).save(str(path), criu.CheckpointOptions(), FILES)
    assert f"Read {bundle}/criu-dump.log" in str(caught.value)
    assert "something is in the way" in (bundle / "criu-dump.log").read_text()
    assert os.listdir(bundle) == ["criu-dump.log"]
    assert (os.listdir(path) == ["mine"]) if there else not path.exists()


async def test_what_others_write_beside_a_failed_checkpoint_is_theirs(
    reaper: Reaper, bundle: Path, tmp_path: Path
) -> None:
    script = f'echo >"{tmp_path}/saved/theirs"; exit 1'
    with pytest.raises(CriuUnsupportedByRuntime):
        await _calls(reaper, bundle, script).save(
            str(tmp_path / "saved"), criu.CheckpointOptions(), {}
        )
    assert os.listdir(tmp_path / "saved") == ["theirs"]


async def test_whole_checkpoint_stays_whatever_fails_after_it(
    reaper: Reaper, bundle: Path, tmp_path: Path
) -> None:
    script = """
    while [ "$1" != --image-path ]; do shift; done
    echo >"$2/core-1.img"; echo '(00.2) Dumping finished successfully' >"$4/dump.log"; exit 1
    """
    with pytest.raises(CheckpointFailed):
        await _calls(reaper, bundle, script).save(
            str(tmp_path / "saved"), criu.CheckpointOptions(exit=True), {}
        )
    assert sorted(os.listdir(tmp_path / "saved")) == [images.RECORD, "core-1.img"]


async def test_failed_restore_leaves_its_log_and_the_checkpoint(
    reaper: Reaper, bundle: Path, tmp_path: Path
) -> None:
    saved = _saved(tmp_path / "elsewhere")
    before = sorted(os.listdir(saved.directory))
    with pytest.raises(RestoreFailed, match="CRIU: something is in the way"):
        await _calls(reaper, bundle, FAIL).restore(saved, ChildStdio(), pid_file="/p")
    assert os.listdir(bundle) == ["criu-restore.log"]
    assert sorted(os.listdir(saved.directory)) == before


async def test_log_of_an_earlier_call_is_not_taken_for_this_ones(
    reaper: Reaper, bundle: Path, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "dump.log").write_text("(00.1) Error (criu/x.c:1): of yesterday\n")
    options = criu.CheckpointOptions(work_path=str(work))
    calls = _calls(reaper, bundle, '[ "$2" = --help ] || exit 1')
    with pytest.raises(CheckpointFailed) as caught:
        await calls.save(str(tmp_path / "saved"), options, {})
    assert "yesterday" not in str(caught.value)


async def test_runtime_without_the_verb_is_told_from_one_that_fails(
    reaper: Reaper, bundle: Path, tmp_path: Path
) -> None:
    with pytest.raises(CriuUnsupportedByRuntime, match="has no command checkpoint"):
        await _calls(reaper, bundle, "exit 1").save(
            str(tmp_path / "saved"), criu.CheckpointOptions(), {}
        )


@pytest.mark.parametrize("path", ["relative", "", "/etc/passwd", "/no/such/parent/saved"])
async def test_checkpoint_needs_a_directory(reaper: Reaper, bundle: Path, path: str) -> None:
    with pytest.raises(CheckpointPathUnusable):
        await _calls(reaper, bundle, TELL).save(path, criu.CheckpointOptions(), {})


@pytest.mark.parametrize("descriptors", ["{}", "[", "[" * 50_000], ids=["object", "cut", "deep"])
def test_descriptors_that_are_no_list_are_refused(tmp_path: Path, descriptors: str) -> None:
    (tmp_path / images.INVENTORY).write_bytes(bytes.fromhex("16313158"))
    (tmp_path / images.DESCRIPTORS).write_text(descriptors)
    with pytest.raises(CheckpointUnusable, match=images.DESCRIPTORS):
        Saved(str(tmp_path), "")


def test_what_is_to_be_restored_has_to_be_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnusable):
        Saved(str(tmp_path), "")
