"""Empty files of an image with the names of the driver's libraries, at which a loader stops."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from hooks.edits.empty_libraries import REASON, covers
from hooks.image.layout import read_layout
from hooks.image.rootfs import Rootfs
from hooks.plan import CachedLibrary, Link, Mount, Plan
from hooks.words import Arch
from tests.unit.hooks.image.images import Make, alpine, debian, fill, put_in, to

DEBIAN, NARROW, MUSL = "/usr/lib/x86_64-linux-gnu", "/usr/lib32", "/usr/lib"
CUDA, NVML = "/driver/libcuda.so.535.1", "/driver/libnvidia-ml.so.535.1"


def driver(home: str) -> Plan:
    names = {
        f"{home}/libcuda.so.535.1": CUDA,
        f"{NARROW}/libcuda.so.535.1": "/driver32/libcuda.so.535.1",
        f"{home}/libnvidia-ml.so.535.1": NVML,
    }
    return Plan(
        mounts=tuple(Mount(source, path) for path, source in names.items()),
        links=(Link(f"{home}/libcuda.so.1", "libcuda.so.535.1"),),
        libraries=(
            CachedLibrary("libcuda.so.1", f"{home}/libcuda.so.535.1", Arch.X86_64),
            CachedLibrary("libcuda.so.1", f"{NARROW}/libcuda.so.535.1", Arch.I386),
            CachedLibrary("libcuda.so", f"{home}/libcuda.so.535.1", Arch.X86_64),
            CachedLibrary("libnvidia-ml.so.1", f"{home}/libnvidia-ml.so.535.1", Arch.X86_64),
        ),
    )


@dataclass(frozen=True)
class Case:
    """An image, and where the driver's libraries are mounted besides their own place."""

    files: Mapping[str, Make]
    covers: Mapping[str, str] = field(default_factory=dict)
    path: str = "/opt/lib"  # LD_LIBRARY_PATH
    image: Callable[[str], str] = debian
    mounts: tuple[dict[str, Any], ...] = ()


VOLUME = {"destination": "/srv", "type": "bind", "source": "/srv", "options": ["rbind"]}
BOTH: dict[str, Make] = {"/opt/lib/libcuda.so.1": b"", "/opt/lib/libnvidia-ml.so.1": b""}
CASES: dict[str, Case] = {
    "two files": Case(
        {**BOTH, "/opt/lib/libc.so.6": b"", "/opt/lib/own.so": b""},
        {"/opt/lib/libcuda.so.1": CUDA, "/opt/lib/libnvidia-ml.so.1": NVML},
    ),
    "no variable": Case(BOTH, path=""),
    "a file with content": Case({"/opt/lib/libcuda.so.1": b"\x7fELF"}),
    "a FIFO": Case({"/opt/lib/libcuda.so.1": os.mkfifo}),
    "an empty directory": Case(
        {"/opt/lib/libcuda.so.1": os.mkdir}, {"/opt/lib/libcuda.so.1": CUDA}
    ),
    "a directory with files": Case(
        {f"/opt/lib/libcuda.so.1/{name}": b"" for name in "ab"}
        | {"/opt/lib/libnvidia-ml.so.1": b""},
        {"/opt/lib/libnvidia-ml.so.1": NVML},
    ),
    "links to a file": Case(
        {
            "/opt/lib/libcuda.so": to("libcuda.so.1"),
            "/opt/lib/libcuda.so.1": to("libcuda.so.470.1"),
            "/opt/lib/libcuda.so.470.1": b"",
        },
        {"/opt/lib/libcuda.so.470.1": CUDA},
    ),
    "a link to a file of another name": Case(
        {"/opt/lib/libcuda.so.1": to("/etc/ld.so.preload"), "/etc/ld.so.preload": b""}
    ),
    "a link that leaves the image": Case(
        {"/opt/lib/libcuda.so.1": to("../../../../outside/libcuda.so.1")}
    ),
    "a dangling link": Case({"/opt/lib/libcuda.so.1": to("/nowhere")}),
    "a directory behind a link": Case(
        {"/opt/lib": to("/usr/local/driver"), "/usr/local/driver/libcuda.so.1": b""},
        {"/usr/local/driver/libcuda.so.1": CUDA},
    ),
    "several directories, in all notations": Case(
        {"/a/libcuda.so.1": b"", "/b/libcuda.so.1": b"", "/c/libcuda.so.1": b""},
        {"/a/libcuda.so.1": CUDA, "/b/libcuda.so.1": CUDA},
        path="::relative:/not/there;/a/:$ORIGIN:/\0:/x/../c:/b:/a",
    ),
    "more directories than anybody has": Case(
        {"/last/libcuda.so.1": b""}, path=":".join([*(f"/{n}" for n in range(16)), "/last"])
    ),
    "a variable longer than anybody's": Case(
        {"/last/libcuda.so.1": b""}, path=f"{':' * (16 << 10)}/last"
    ),
    "a volume": Case(
        {"/srv/libcuda.so.1": b"", "/opt/lib/libcuda.so.1": to("/srv/libcuda.so.1")},
        path="/srv:/opt/lib",
        mounts=(VOLUME,),
    ),
    "where the libraries go": Case(
        {f"{DEBIAN}/libcuda.so.1": b"", f"{DEBIAN}/libnvidia-ml.so.535.1": b""},
        path=f"/usr/lib:{DEBIAN}",
    ),
    "a link to where the libraries go": Case(
        {"/opt/lib/libcuda.so.1": to(f"{DEBIAN}/libcuda.so.1"), f"{DEBIAN}/libcuda.so.1": b""}
    ),
    "musl, and no variable": Case(
        {"/lib/libcuda.so.1": b"", "/usr/local/lib/libcuda.so.1": b"", "/opt/libcuda.so.1": b""},
        {"/lib/libcuda.so.1": CUDA, "/usr/local/lib/libcuda.so.1": CUDA},
        path="",
        image=alpine,
    ),
    "musl with a path of its own": Case(
        {"/etc/ld-musl-x86_64.path": b"/opt", "/opt/libcuda.so.1": b"", "/lib/libcuda.so.1": b""},
        {"/opt/libcuda.so.1": CUDA},
        path="",
        image=alpine,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_libraries_are_mounted_over_empty_files_that_hide_them(tmp_path: Path, case: Case) -> None:
    root = case.image(f"{tmp_path}/image")
    fill(root, case.files)
    plan = driver(MUSL if case.image is alpine else DEBIAN)
    with Rootfs.open(root) as rootfs:
        layout = read_layout(rootfs, (Arch.X86_64, Arch.I386), case.mounts)
        more = covers(plan, rootfs, layout, {"LD_LIBRARY_PATH": case.path})
    assert set(more) == {Mount(source, at, reason=REASON) for at, source in case.covers.items()}
    made = replace(plan, mounts=(*plan.mounts, *more))
    # Each has its mount point in the image: a regular file, and no link.
    placed = put_in(root, made, case.mounts, arches=(Arch.X86_64, Arch.I386))
    assert placed.omitted == ()
    for path in case.covers:
        assert os.path.isfile(root + path)
        assert not os.path.islink(root + path)
