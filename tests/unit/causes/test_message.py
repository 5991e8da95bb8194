"""The termination message: the choice of its file, and the text that is appended."""

from __future__ import annotations

import ctypes
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from shim import syscalls
from shim.causes.message import LARGEST, append, find_message_file

LIBC = ctypes.CDLL(None)
IN_OPEN = 0x20
OF_KUBELET = "pods/add545db-3370-4b63-a1e5-c52a0da8ca30/containers/main/0a1b2c3d"
DEFAULT = "/dev/termination-log"
PATH = "io.kubernetes.container.terminationMessagePath"
POLICY = "io.kubernetes.container.terminationMessagePolicy"


def bind(source: str, destination: str = DEFAULT, *options: str, **more: Any) -> dict[str, Any]:
    options = options or ("rbind", "rprivate", "rw")
    return {
        "type": "bind", "source": source, "destination": destination, "options": list(options),
        **more,
    }  # fmt: skip


KUBELETS = f"/var/lib/kubelet/{OF_KUBELET}"
OTHER = KUBELETS.replace("0a1b2c3d", "4e5f6a7b")


@pytest.mark.parametrize(
    ("mounts", "annotations", "found"),
    [
        ([], {}, ""),
        ([bind(KUBELETS)], {}, KUBELETS),
        ([bind(f"/{OF_KUBELET}")], {}, f"/{OF_KUBELET}"),
        ([bind(KUBELETS, "/dev//termination-log/")], {}, KUBELETS),
        ([bind(KUBELETS), bind(OTHER)], {}, OTHER),
        ([bind(KUBELETS), bind(OTHER, "/c")], {}, KUBELETS),
        ([bind(KUBELETS, "/tmp/end"), bind(OTHER, "/c")], {PATH: "/tmp/end"}, KUBELETS),
        ([bind(KUBELETS, "/tmp/end")], {}, KUBELETS),
        ([bind(f"{KUBELETS}0", "/tmp/end")], {}, ""),
        ([bind(KUBELETS, DEFAULT, "rbind", "ro")], {}, ""),
        ([bind(KUBELETS, type="tmpfs", options=[])], {}, ""),
        ([bind(KUBELETS, type="none")], {}, KUBELETS),
        ([bind(KUBELETS[1:])], {}, ""),
        ([None, 7, {}, {"source": KUBELETS}, {"destination": DEFAULT},
          bind(KUBELETS, options=None)], {}, KUBELETS),
        ([bind(KUBELETS), bind(OTHER, "/c", options=7)], {PATH: [DEFAULT]}, KUBELETS),
        # A pod's own volume at that path is not the kubelet's file.
        ([bind("/a")], {}, ""),
        ([bind("/dev/nvidia0")], {}, ""),
        ([bind("/a", "/tmp/end")], {PATH: "/tmp/end"}, ""),
        ([bind(KUBELETS), bind("/a")], {}, KUBELETS),
        ([bind(KUBELETS, "/tmp/end"), bind("/a")], {}, KUBELETS),
        ([bind(f"{KUBELETS}/../../../../../../../../etc/passwd")], {}, ""),
    ],
)  # fmt: skip
def test_the_file_is_found(mounts: list[Any], annotations: dict[str, Any], found: str) -> None:
    spec = {"mounts": mounts, "annotations": annotations}
    assert find_message_file(spec) == (found, False)


@pytest.mark.parametrize("spec", [{}, {"mounts": 7, "annotations": []}, {"mounts": None}])
def test_a_spec_of_another_shape_has_none(spec: dict[str, Any]) -> None:
    assert find_message_file(spec) == ("", False)


def test_the_policy_is_heeded() -> None:
    spec = {"mounts": [bind(KUBELETS)], "annotations": {POLICY: "FallbackToLogsOnError"}}
    assert find_message_file(spec) == (KUBELETS, True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of the kubelet's file, which does not exist yet."""
    path = tmp_path / "kubelet" / OF_KUBELET
    path.parent.mkdir(parents=True)
    return path


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "cause\n"),
        ("mine", "mine\ncause\n"),
        ("mine\n", "mine\ncause\n"),
        ("x" * (LARGEST - 7), "x" * (LARGEST - 7) + "\ncause\n"),
        ("x" * (LARGEST - 6), None),
        ("x" * (LARGEST - 7) + "\n", "x" * (LARGEST - 7) + "\ncause\n"),
        ("x" * (LARGEST - 6) + "\n", None),
        ("x" * LARGEST, None),
        ("x" * 10 * LARGEST, None),
    ],
)
def test_a_line_is_written_behind_what_is_there(path: Path, before: str, after: str | None) -> None:
    path.write_text(before)
    assert append(str(path), "cause") is (after is not None)
    assert path.read_text() == (before if after is None else after)


def test_an_empty_file_can_stay_empty(path: Path) -> None:
    path.touch()
    assert not append(str(path), "cause", unless_empty=True)
    assert path.read_text() == ""
    path.write_text("mine\n")
    assert append(str(path), "cause", unless_empty=True)
    assert path.read_text() == "mine\ncause\n"


def test_the_kubelets_own_directory_may_be_a_link_and_nothing_below_it(tmp_path: Path) -> None:
    file = tmp_path / "data" / OF_KUBELET
    file.parent.mkdir(parents=True)
    file.touch()
    (tmp_path / "kubelet").symlink_to("data")
    assert append(str(tmp_path / "kubelet" / OF_KUBELET), "cause")
    assert file.read_text() == "cause\n"
    pods = file.parent.parent.parent
    os.rename(pods, tmp_path / "elsewhere")
    pods.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        append(str(tmp_path / "kubelet" / OF_KUBELET), "cause")


@pytest.mark.parametrize("kind", ["link", "link on the way", "fifo", "device", "hard link", "none"])
def test_what_is_no_file_of_its_own_is_not_written_to(path: Path, kind: str) -> None:
    other = path.parents[3] / "other"
    other.write_text("of another\n")
    if kind == "link":
        path.symlink_to(other)
    elif kind == "link on the way":
        path.parent.rmdir()
        path.parent.symlink_to(other.parent)
        (other.parent / path.name).write_text("of another\n")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        os.mknod(path, 0o20666, os.makedev(1, 3))
    elif kind == "hard link":
        os.link(other, path)
    with pytest.raises(OSError, match=r"."):
        append(str(path), "cause")
    assert other.read_text() == "of another\n"


def test_a_file_that_is_not_the_kubelets_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "message"
    path.touch()
    with pytest.raises(OSError, match="not a file of the kubelet"):
        append(str(path), "cause")
    assert path.read_text() == ""


@pytest.mark.parametrize("kind", [stat.S_IFIFO, stat.S_IFCHR])
def test_what_is_no_regular_file_is_not_even_opened(path: Path, kind: int) -> None:
    """Opening has effects: a watchdog starts, a tape rewinds, a FIFO's writer continues."""
    os.mknod(path, kind | 0o666, os.makedev(1, 3))
    watch = syscalls.inotify_init()
    try:
        assert LIBC.inotify_add_watch(watch, os.fsencode(path), IN_OPEN) > 0
        with pytest.raises(OSError, match="not a regular file"):
            append(str(path), "cause")
        with pytest.raises(BlockingIOError):
            os.read(watch, 4096)
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        assert os.read(watch, 4096), "an open would have been seen"
    finally:
        os.close(watch)


def test_a_disk_without_room_leaves_the_file_as_it_was(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text("mine\n")
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, text, at: real(fd, text[:3], at))
    with pytest.raises(OSError, match="No space left"):
        append(str(path), "cause")
    assert path.read_text() == "mine\n"
