"""CRIU's arguments and messages, and the record that we leave in a checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Final

import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from hypothesis import given
from hypothesis import strategies as st

from api import typeurl
from api.errors import NvshimError, Status
from api.proto import linux_runc_pb2, runc_options_pb2
from shim import syscalls
from shim.checkpoint import criu, images
from shim.checkpoint.errors import (
    CheckpointFailed,
    CheckpointOptionsInvalid,
    CheckpointUnusable,
    CriuNotFound,
    CriuTooOld,
    CriuUnsupportedByKernel,
    CriuUnsupportedByRuntime,
    RestoreFailed,
)
from tests.harness.fuse import FILE, fuse
from tests.harness.raising import Kind, is_error, raises
from tests.harness.waiting import eventually
from tests.unit.hooks.image.images import Make, device, fill, to

INVENTORY: Final = bytes.fromhex("163131584e000000080210011a18")


def _options(**fields: object) -> criu.CheckpointOptions:
    return criu.read_options(typeurl.pack(runc_options_pb2.CheckpointOptions(**fields)))  # type: ignore[arg-type]


# -- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize("message", [None, AnyMessage()])
def test_without_options_the_container_goes_on(message: AnyMessage | None) -> None:
    assert criu.read_options(message).words("/i", "/w") == [
        "--image-path", "/i", "--work-path", "/w", "--leave-running",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"open_tcp": True}, ["--tcp-established"]),
        ({"external_unix_sockets": True}, ["--ext-unix-sk"]),
        ({"terminal": True}, ["--shell-job"]),
        ({"file_locks": True}, ["--file-locks"]),
        ({"empty_namespaces": ["network", "ipc"]}, ["--empty-ns", "network", "--empty-ns", "ipc"]),
        ({"cgroups_mode": "strict"}, ["--manage-cgroups-mode", "strict"]),
        ({"image_path": "/elsewhere"}, []),  # containerd looks at the request's path
        ({"parent_path": "../before"}, ["--parent-path", "../before"]),
        ({"parent_path": "/checkpoints/before"}, ["--parent-path", "../../before"]),
    ],
)
def test_each_option_has_its_flag(fields: dict[str, object], words: list[str]) -> None:
    said = _options(exit=True, **fields).words("/checkpoints/some/now", "/w")
    assert said == ["--image-path", "/checkpoints/some/now", "--work-path", "/w", *words]


def test_options_of_the_first_generation_have_other_numbers_and_the_same_flags() -> None:
    options = criu.read_options(
        typeurl.pack(
            linux_runc_pb2.CheckpointOptions(
                exit=True, open_tcp=True, work_path="/logs", image_path="/elsewhere"
            )
        )
    )
    assert options.words("/i", "/w") == [
        "--image-path", "/i", "--work-path", "/w", "--tcp-established",
    ]  # fmt: skip
    assert options.work_path == "/logs"


def test_work_path_is_taken_from_the_options() -> None:
    assert _options(work_path="/logs").work_path == "/logs"


@pytest.mark.parametrize(
    "message",
    [
        AnyMessage(type_url="containerd.runc.v1.Options"),
        AnyMessage(type_url="containerd.runc.v1.CheckpointOptions", value=b"\xff"),
    ],
)
def test_options_that_are_none_are_refused(message: AnyMessage) -> None:
    with raises(CheckpointOptionsInvalid) as caught:
        criu.read_options(message)
    assert caught.value.status == Status.INVALID_ARGUMENT


# -- external files ------------------------------------------------------------------------------


@contextmanager
def _apart(stdin: int, stdout: int, stderr: int) -> Iterator[int]:
    """Start a process in its own mount namespace, which lacks our files; yield its pid."""
    argv = ["unshare", "--mount", "sleep", "1000"]
    child = subprocess.Popen(argv, stdin=stdin, stdout=stdout, stderr=stderr)
    try:
        ours = os.readlink("/proc/self/ns/mnt")
        eventually(lambda: os.readlink(f"/proc/{child.pid}/ns/mnt") != ours, "it is apart")
        yield child.pid
    finally:
        child.kill()
        child.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_stdio_outside_of_the_containers_mounts_is_external(tmp_path: Path) -> None:
    for name in ("in", "out"):
        os.mkfifo(tmp_path / name)
    ends = [os.open(tmp_path / name, os.O_RDWR) for name in ("in", "out")]
    reading, writing = os.pipe()
    paths = [str(tmp_path / "in"), str(tmp_path / "out"), None]
    try:
        with _apart(ends[0], ends[1], writing) as pid:
            files = criu.external_files(pid, [], paths)
            # A file that init has closed, but a child still holds, is identified by its path.
            with _apart(subprocess.DEVNULL, writing, writing) as init:
                assert criu.external_files(init, [pid], paths) == files
                assert criu.external_files(init, [], paths) == {}
        inodes = {int(name.split(":")[1].rstrip("]"), 16): n for name, n in files.items()}
        # The runtime declares the pipe itself.
        assert inodes == {os.fstat(ends[0]).st_ino: 0, os.fstat(ends[1]).st_ino: 1}
    finally:
        for fd in (*ends, reading, writing):
            os.close(fd)


def test_files_that_the_container_sees_itself_are_not_external(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        child = subprocess.Popen(["sleep", "1000"], stdin=file, stdout=file, stderr=file)
        try:
            assert criu.external_files(child.pid, [], [None, file.name, None]) == {}
        finally:
            child.kill()
            child.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_files_on_mounts_of_the_containers_own_making_are_not_asked_for(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with fuse(str(tmp_path / "fuse")) as server:
        syscalls.mount(server.mount_point, str(other), "", syscalls.MS_BIND)
        number = os.open(other / FILE, os.O_PATH)
        # Nobody sees this mount, as nobody outside sees one of a nested namespace.
        syscalls.umount(str(other), syscalls.MNT_DETACH)
        with _apart(number, number, number) as init:
            server.hang()
            assert criu.external_files(init, [], [None, None, None]) == {}
            assert not server.asked.is_set()
        os.close(number)


def test_process_that_has_ended_has_no_files() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert criu.external_files(child.pid, [], [None, None, None]) == {}


def test_config_names_each_file_for_the_dump_and_its_descriptor_for_the_restore() -> None:
    files = {"file[1b:292044]": 0, "file[1b:292054]": 1}
    assert criu.dump_config(files) == "external file[1b:292044]\nexternal file[1b:292054]\n"
    assert criu.restore_config(files) == (
        "inherit-fd fd[0]:file[1b:292044]\ninherit-fd fd[1]:file[1b:292054]\n"
    )
    assert criu.dump_config({}) == criu.restore_config({}) == ""


# -- the record ----------------------------------------------------------------------------------

_records = st.builds(
    images.Record,
    st.dictionaries(
        st.from_regex(r"\Afile\[[0-9a-f]{1,8}:[0-9a-f]{1,16}\]\Z"), st.sampled_from([0, 1, 2])
    ),
    st.builds(
        images.Switches,
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.lists(st.sampled_from(["network", "ipc"])).map(tuple),
        st.sampled_from(["", "soft", "full"]),
    ),
)


@given(_records)
def test_record_is_read_as_it_was_written(record: images.Record) -> None:
    assert images.Record.decode(record.encode()) == record


@given(st.one_of(st.binary(), st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(
        st.sampled_from(["files", "switches", "open_tcp", "empty_namespaces", "x"]), inner
    ),
).map(lambda value: json.dumps(value).encode())))  # fmt: skip
def test_any_content_is_a_record_or_refused(content: bytes) -> None:
    try:
        record = images.Record.decode(content)
    except ValueError:
        return
    assert images.Record.decode(record.encode()) == record


@pytest.mark.parametrize(
    "files",
    [
        {"file[1b:2]\naction-script /tmp/evil": 1},
        {"file[1b:2] ": 1},
        {"extRootNetNS": 1},
        {"file[1b:2]": 3},
        {"file[1b:2]": True},
        {"file[1b:2]": "1"},
    ],
)
def test_no_image_can_tell_criu_more_than_a_files_name(files: dict[str, object]) -> None:
    content = json.dumps({"files": files, "switches": {}}).encode()
    with pytest.raises(ValueError, match="files"):
        images.Record.decode(content)


@pytest.mark.parametrize(
    "switches",
    [
        {"cgroups_mode": "--bundle"},
        {"cgroups_mode": "soft\n"},
        {"empty_namespaces": ["--pid-file"]},
        {"empty_namespaces": [1]},
        {"open_tcp": 1},
        {"unknown": True},
        [],
    ],
)
def test_no_image_can_add_arguments(switches: object) -> None:
    content = json.dumps({"files": {}, "switches": switches}).encode()
    with pytest.raises(ValueError, match="switches"):
        images.Record.decode(content)


# -- the directory -------------------------------------------------------------------------------

GOOD: Final[dict[str, Make]] = {
    images.INVENTORY: INVENTORY,
    images.DESCRIPTORS: b'["/dev/null", "pipe:[1]", "pipe:[2]"]',
}


def _checkpoints(
    top: Path, *names: str, changes: Mapping[str, Make | None] = MappingProxyType({})
) -> str:
    """Make checkpoints below a directory, the last with changes; return its path."""
    for name in names:
        fill(f"{top}/{name}/", GOOD)
    last = f"{top}/{names[-1]}/"
    for name, make in changes.items():
        if name in GOOD:
            os.unlink(last + name)
        if make is not None:
            fill(last, {name: make})
    return last.rstrip("/")


ANYTHING_BUT_FILES: Final[dict[str, Make]] = {
    "a link": to("/etc/shadow"), "a link beside": to(images.INVENTORY),
    "a dangling link": to("gone"), "a FIFO": os.mkfifo, "a device": device,
}  # fmt: skip
RECORD: Final = images.Record({"file[1:2]": 1}, images.Switches(open_tcp=True), driver_layer=True)

REFUSED: Final[dict[str, tuple[dict[str, Make | None], str]]] = {
    "no inventory": ({images.INVENTORY: None}, "no inventory.img in it"),
    "inventory of garbage": ({images.INVENTORY: b"garbage"}, "inventory.img is not CRIU's"),
    "empty inventory": ({images.INVENTORY: b""}, "inventory.img is not CRIU's"),
    "no descriptors": ({images.DESCRIPTORS: None}, "no list of descriptors"),
    **{
        f"descriptors {text[:8]!r}": ({images.DESCRIPTORS: text}, "no list of descriptors")
        for text in (b"{}", b"\xff", b"[", b"[" * 50_000)
    },
    "descriptors without end": ({images.DESCRIPTORS: b"[" * 70_000}, "too long"),
    "record of garbage": ({images.RECORD: b"garbage"}, "containerd-shim-nvidia.json"),
    "record without files": ({images.RECORD: b'{"files": {"x": 1}}'}, "no table of files"),
    "record with a layer of its own": (
        {images.RECORD: RECORD.encode().replace(b"true}", b'"/x"}')},
        "no table|driver's files",
    ),
    "record that is a link": ({images.RECORD: to("/etc/passwd")}, "not a regular file"),
    "record that is a FIFO": ({images.RECORD: os.mkfifo}, "not a regular file"),
    "record that is a directory": ({images.RECORD: os.mkdir}, "not a regular file"),
    # CRIU follows links: the pages image could be any file of the host.
    **{
        f"{name} that is {kind}": ({name: make}, "not a regular file")
        for name in ("pages-1.img", "extra")
        for kind, make in ANYTHING_BUT_FILES.items()
    },
    "pages that are a directory": ({"pages-1.img": os.mkdir}, "not a regular file"),
    "parents in a circle": ({"parent": to("../c")}, "more than 64 parents"),
    **{
        f"parent {target}": (
            {"parent": to(target)},
            r"not a directory next to it|more than 64 parents",
        )
        for target in ("/tmp", "../../b/1", "../../../../../etc", ".", "gone")
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_checkpoint_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    changes, found = REFUSED[name]
    with raises(CheckpointUnusable, match=found) as caught:
        images.open_checkpoint(_checkpoints(tmp_path, "c", changes=changes))
    assert caught.value.status == Status.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("changes", "record"),
    [
        ({}, images.Record({}, images.NO_SWITCHES)),  # made by another shim
        ({images.RECORD: RECORD.encode()}, RECORD),
        ({images.RECORD: RECORD.encode(), "notes": os.mkdir}, RECORD),  # another program's
    ],
)
def test_record_in_a_checkpoint_is_read(
    tmp_path: Path, changes: dict[str, Make], record: images.Record
) -> None:
    assert images.open_checkpoint(_checkpoints(tmp_path, "c", changes=changes)) == record


def test_parent_beside_a_checkpoint_is_found_and_looked_into(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        parent: Mapping[str, Make] = {"parent": to(f"../{number - 1}")} if number > 1 else {}
        last = _checkpoints(tmp_path, str(number), changes=parent)
    images.open_checkpoint(last)
    (tmp_path / "1" / "pages-1.img").symlink_to("/etc/shadow")
    with raises(CheckpointUnusable, match="not a regular file"):
        images.open_checkpoint(last)


def test_parent_elsewhere_is_followed_only_if_it_is_named(tmp_path: Path) -> None:
    elsewhere = _checkpoints(tmp_path, "b/1")
    directory = _checkpoints(tmp_path, "a/1", "a/2", changes={"parent": to(f"{tmp_path}/a/1")})
    with raises(CheckpointUnusable, match="not a directory next to it"):
        images.open_checkpoint(directory)
    images.open_checkpoint(directory, elsewhere)
    assert os.path.samefile(f"{directory}/parent", elsewhere)


@pytest.mark.parametrize("directory", ["/no/such/directory", "relative", "/etc/passwd"])
def test_checkpoint_that_is_not_there_is_refused(directory: str) -> None:
    with raises(CheckpointUnusable, match="no such directory"):
        images.open_checkpoint(directory)


def test_parent_is_linked_wherever_it_was_unpacked_if_it_is_there(tmp_path: Path) -> None:
    parent = _checkpoints(tmp_path, "elsewhere")
    directory = _checkpoints(tmp_path, "c", changes={"parent": to("../gone")})
    images.link_parent(directory, parent)
    assert os.path.samefile(f"{directory}/parent", parent)
    with raises(CheckpointUnusable, match="no such directory of the parent"):
        images.link_parent(directory, str(tmp_path / "none"))
    os.unlink(f"{directory}/parent")
    os.mkdir(f"{directory}/parent")
    with raises(CheckpointUnusable, match="file exists"):
        images.link_parent(directory, directory)


# -- error messages ------------------------------------------------------------------------------

NEWER_KERNEL: Final = """\
(00.000816) Version: 3.17.1 (gitid 0)
(00.001123) Error (criu/util.c:642): exited, status=1
(00.001895) Error (criu/util.c:642): exited, status=1
(00.010086) Error (criu/vdso.c:381): vdso: Unexpected rt vDSO area bounds
(00.010088) Error (criu/vdso.c:613): vdso: Failed to fill self vdso symtable
(00.010090) Error (criu/kerndat.c:1615): kerndat_vdso_fill_symtable failed when initializing kerndat.
(00.010123) files stat: fs/nr_open 1048576
"""  # noqa: E501 - as CRIU writes it

LOCK: Final = """\
(00.039372) Error (criu/util.c:1533): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted
(00.140000) Error (criu/file-lock.c:110): Some file locks are hold by dumping tasks! You can try --file-locks to dump them.
(00.147772) \tUnseizing 16985 into 1
(00.147948) Error (criu/cr-dump.c:2111): Dumping FAILED.
"""  # noqa: E501 - as CRIU writes it

ENDED: Final = """\
(00.001061) Error (criu/util.c:1533): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted
(00.141354) Unfreezing tasks into 1
"""  # noqa: E501 - as CRIU writes it

RESTORE: Final = """\
(00.001895) Error (criu/util.c:642): exited, status=1
(00.000001)      1: Error (criu/files-reg.c:2250): Can't open file bin/busybox on restore: No such file or directory
(00.000002)      1: Error (criu/mem.c:1000): `- Can't open vma
(00.000003) Error (criu/cr-restore.c:1500): 16985 killed by signal 9: Killed
(00.000004) Error (criu/cr-restore.c:2500): Restoring FAILED.
"""  # noqa: E501 - as CRIU writes it

NO_ERROR: Final = "(00.000816) Version: 4.1.1 (gitid 0)\n(00.1) Dumping finished successfully\n"


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (
            NEWER_KERNEL,
            (
                "vdso: Unexpected rt vDSO area bounds; "
                "kerndat_vdso_fill_symtable failed when initializing kerndat."
            ),
        ),
        (
            LOCK,
            "Some file locks are hold by dumping tasks! You can try --file-locks to dump them.",
        ),
        (
            RESTORE,
            "Can't open file bin/busybox on restore: No such file or directory; `- Can't open vma",
        ),
        ("(00.1) Error (criu/cr-dump.c:1): Dumping FAILED.\n", "Dumping FAILED."),
        (NO_ERROR, ""),
        ("", ""),
    ],
)
def test_last_words_are_the_cause(log: str, words: str) -> None:
    assert criu.last_words(log) == words


SAID: Final = "criu failed: type NOTIFY errno 0 log file: /w/dump.log"


@pytest.mark.parametrize(
    ("verb", "said", "log", "kind", "quoted"),
    [
        ("checkpoint", SAID, LOCK, CheckpointFailed, "CRIU: Some file locks"),
        ("restore", SAID, RESTORE, RestoreFailed, "CRIU: Can't open file bin/busybox"),
        ("checkpoint", SAID, NEWER_KERNEL, CriuUnsupportedByKernel, "CRIU: vdso: Unexpected"),
        ("checkpoint", SAID, "", CheckpointFailed, SAID),
        ("checkpoint", "exit status 137", ENDED, CheckpointFailed, "of c1: exit status 137"),
        (
            "restore",
            "container with given ID already exists",
            "",
            RestoreFailed,
            "container with given ID already exists",
        ),
        (
            "checkpoint",
            'CRIU version check failed: exec: "criu": executable file not found in $PATH',
            "",
            CriuNotFound,
            "executable file not found",
        ),
        (
            "checkpoint",
            "failed to load `libcriu.so.2`: cannot open shared object file",
            "",
            CriuNotFound,
            "libcriu",
        ),
        ("restore", "CRIU version 20000 must be 30000 or higher", "", CriuTooOld, "must be 30000"),
        ("checkpoint", "", "", CriuUnsupportedByRuntime, "has no command checkpoint"),
        ("restore", "unknown command restore", "", CriuUnsupportedByRuntime, "unknown command"),
    ],
)
def test_each_failure_is_an_error_of_its_own(
    verb: str, said: str, log: str, kind: Kind[NvshimError], quoted: str
) -> None:
    error = criu.failure(verb, "c1", said=said, log=log, kept="/b/criu-dump.log")
    assert is_error(error, kind)
    assert quoted in str(error)
    its_log_helps = kind in (CheckpointFailed, RestoreFailed) and log not in {"", ENDED}
    assert ("/b/criu-dump.log" in str(error)) == its_log_helps


@given(st.text(), st.text())
def test_whatever_is_said_becomes_one_line(said: str, log: str) -> None:
    assert "\n" not in str(criu.failure("restore", "c1", said=said, log=log, kept="/k"))


def test_long_log_is_read_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "dump.log"
    path.write_text("x" * (2 << 20) + "\n" + LOCK)
    assert criu.last_words(criu.read_log(str(path))).startswith("Some file locks")
    assert criu.read_log(str(tmp_path / "none")) == ""
    (tmp_path / "link").symlink_to(path)
    assert criu.read_log(str(tmp_path / "link")) == ""
