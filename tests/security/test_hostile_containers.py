"""Run hostile images as real containers, and check the host from outside.

test_hostile_images tests what the shim itself writes into an image. This module tests the whole
stack: containerd, the shim, old and new versions of runc and crun. After each container

- the canary, a tree of the host that the image's links point to, has not changed in any byte or
  time;
- the host's mount table has not changed, and the container had only the driver's files and those of
  the bundle mounted from the host, by its mountinfo, the paths in the spec, and their inodes;
- the spec still has everything that isolates the container, and has no new hook;
- the shim has no new open descriptor;
- the shim opened each file below the rootfs with openat2 from the root, or by a single name in a
  directory that was opened that way (strace).

The places of the images' links are derived from the edits for a GPU container: each path that is
mounted, linked or written, and each directory on the way to it.

The installed runtimes have known races over mount points (CVE-2024-45310, CVE-2025-52565,
CVE-2026-41579). So tests where the image changes during the container's creation, or uses
descriptors that a runtime leaves open, run only with the newest.

``make test-hostile SECONDS=600`` races for that long, and tests every link with every way out.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import time
from collections import Counter
from contextlib import contextmanager
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.harness.hostile import (
    MULTIARCH,
    WAYS_OUT,
    Canary,
    calls_below,
    descriptors,
    foreign_mounts,
    foreign_sources,
    host_mounts,
    put_link,
    traced,
)
from tests.harness.own_process import restored
from tests.harness.runtime import OURS, Runtime
from tests.harness.waiting import settled
from tests.security.conftest import SECONDS, THOROUGH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.harness.hostile import Ground, Seen

pytestmark = [
    pytest.mark.security,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it tests what root could damage"),
]

# All ways out take more than five hundred containers, one after another under strace. Each takes a
# second or more on a busy machine.
LONG: Final = pytest.mark.timeout(240 + 3 * SECONDS + 3600 * THOROUGH)

INSTALLED: Final = ("runc", "crun")
RELEASES: Final = ("installed", "newest")

# Places that the shim may read in the image besides those in the plan.
MORE_PLACES: Final = (
    "/usr/local",
    "/usr/local/cuda",
    "/usr/local/cuda/compat",
    "/run",
    "/var/run",
    "/usr/lib64",
    "/lib64",
    "/proc",
    "/sys",
)

LOAD: Final = ("probe", "dlopen", "libcuda.so.1", "libnvidia-ml.so.1")


@pytest.fixture(scope="module")
def ordinary(ground: Ground) -> Seen:
    """Run the harmless image as a container."""
    seen = ground.run(ground.image(), *LOAD)
    assert seen.refused == ""
    assert f"libcuda.so.1 {MULTIARCH}/libcuda.so" in seen.output
    return seen


@pytest.fixture(scope="module")
def places(ordinary: Seen) -> tuple[list[str], list[str]]:
    """Return the parent directories of the files that the shim adds, and these files."""
    edits = ordinary.record["edits"]
    files = {entry["path"] for kind in ("devices", "links") for entry in edits[kind]}
    files |= {mount["destination"] for mount in edits["mounts"]} | set(ordinary.record["written"])
    directories = set(MORE_PLACES)
    for path in files:
        while (path := os.path.dirname(path)) != "/":
            directories.add(path)
    assert len(directories) > 25
    assert len(files) > 80
    return sorted(directories), sorted(files - directories)


@pytest.fixture(scope="module")
def canary(ground: Ground, places: tuple[list[str], list[str]], workshop: str) -> Canary:
    return Canary(f"{workshop}/canary", places[1])


@pytest.fixture
def judged(ground: Ground, canary: Canary, tmp_path: Path) -> Iterator[Callable[[Seen], None]]:
    """Yield a check for each container; check for lasting changes after the test."""
    watched = (ground.containerd.directory, ground.runtime_states, canary.path, str(tmp_path))
    mounts = host_mounts(*watched)
    opened = Counter(descriptors(ground.shim))
    driver_root = ground.node.driver_root
    # The second directory has the volumes of the test.
    allowed = (ground.containerd.directory, f"{tmp_path}/volume")
    before = ground.spec()

    def judge(seen: Seen) -> None:
        assert not canary.is_dead, seen.refused
        assert "Traceback" not in seen.refused
        if not seen.spec:
            assert seen.refused
            return
        # crun covers directories with an empty directory of its own.
        states = ground.runtime_states
        assert foreign_mounts(seen, allowed=(driver_root, *allowed, states)) == []
        assert foreign_sources(seen, before, driver_root=driver_root, allowed=allowed) == []
        assert _shut_in(seen.spec) == _shut_in(before)
        assert all(
            not f"{mount['destination']}/".startswith(("/proc/", "/sys/"))
            for mount in seen.spec["mounts"]
            if mount not in before["mounts"]
        )

    log = f"{tmp_path}/strace"
    with traced(ground.shim, log):
        yield judge
    bad, good = calls_below(log, f"{ground.containerd.bundle('[^/]+')}/rootfs")
    assert bad == []
    assert good > 20
    # A connection that closes meanwhile is not a leak.
    assert settled(lambda: sorted(Counter(descriptors(ground.shim)) - opened), []) == []
    assert settled(lambda: host_mounts(*watched), mounts) == mounts


def _shut_in(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a spec that isolate a container."""
    linux = spec["linux"]
    names = ("maskedPaths", "readonlyPaths", "seccomp", "mountLabel", "rootfsPropagation")
    process = ("capabilities", "noNewPrivileges", "apparmorProfile", "selinuxLabel", "cwd")
    return {
        "hooks": spec.get("hooks"),
        "namespaces": [n["type"] for n in linux["namespaces"]],
        **{name: linux.get(name) for name in names},
        **{name: spec["process"].get(name) for name in process},
    }


def _runtime(low_levels: dict[str, str], kind: str, release: str) -> str:
    names = [name for name in low_levels if name.startswith(f"{kind} ")]
    return low_levels[names[0] if release == "installed" else names[-1]]


@LONG
@pytest.mark.parametrize("kind", INSTALLED)
@pytest.mark.parametrize("release", RELEASES)
def test_a_link_at_every_directory_leads_nowhere(
    ground: Ground,
    canary: Canary,
    places: tuple[list[str], list[str]],
    low_levels: dict[str, str],
    judged: Callable[[Seen], None],
    kind: str,
    release: str,
) -> None:
    """CVE-2024-0132, -0133, CVE-2025-23359, CVE-2026-41579, CVE-2026-47766."""
    low_level = _runtime(low_levels, kind, release)
    ways = list(WAYS_OUT)
    if THOROUGH:
        cases = [(path, way) for path in places[0] for way in ways]
    else:
        # The cases split the directories among them. Each starts with another way out.
        number = INSTALLED.index(kind) + 2 * RELEASES.index(release)
        shared = places[0][number::4]
        cases = list(zip(shared, cycle([*ways[4 * number :], *ways[: 4 * number]]), strict=False))
    for path, way in cases:
        image = ground.image()
        put_link(image, path, canary.target(way, path))
        # If the program's libraries are behind the link, it is refused or fails.
        judged(ground.run(image, "/usr/bin/true", low_level=low_level))


@pytest.mark.parametrize("kind", INSTALLED)
@pytest.mark.parametrize("way", ["absolute", "up and up", "through init's procfs"])
def test_links_at_all_places_at_once_lead_nowhere(
    ground: Ground,
    canary: Canary,
    places: tuple[list[str], list[str]],
    low_levels: dict[str, str],
    judged: Callable[[Seen], None],
    kind: str,
    way: str,
) -> None:
    """CVE-2024-0132, -0133, -0134: the last component of each path is a link."""
    image = ground.image()
    for path in places[1]:
        if not path.startswith("/dev/"):
            put_link(image, path, canary.target(way, path))
    seen = ground.run(image, *LOAD, low_level=_runtime(low_levels, kind, "installed"))
    judged(seen)
    assert seen.refused == ""
    # The shim replaces links of the image with its own files, so the container runs.
    assert f"libcuda.so.1 {MULTIARCH}/libcuda.so." in seen.output


@pytest.mark.parametrize(
    ("kind", "release"),
    [
        ("runc", "installed"),
        ("crun", "newest"),
        # Each of the two, with the other's.
        pytest.param("crun", "installed", marks=pytest.mark.thorough),
        pytest.param("runc", "newest", marks=pytest.mark.thorough),
    ],
)
def test_dev_that_is_a_link_leads_nowhere(
    ground: Ground,
    canary: Canary,
    low_levels: dict[str, str],
    judged: Callable[[Seen], None],
    kind: str,
    release: str,
) -> None:
    """CVE-2026-41579, CVE-2026-47766: also without the tmpfs that usually hides /dev."""

    def without_dev(spec: dict[str, Any]) -> None:
        kept = [m for m in spec["mounts"] if not f"{m['destination']}/".startswith("/dev/")]
        spec["mounts"] = kept

    low_level = _runtime(low_levels, kind, release)
    cases = {"/dev": "absolute", "/dev/dri": "up and up", "/dev/nvidia0": "absolute"}
    for path, way in cases.items():
        for edit in (None, without_dev):
            image = ground.image()
            put_link(image, path, canary.target(way, path))
            judged(ground.run(image, "/usr/bin/true", low_level=low_level, edit=edit))


def _huge(path: str) -> None:
    with open(path, "wb") as file:
        file.truncate(5 << 30)


def _socket(path: str) -> None:
    # The path itself may be too long for a socket's address.
    with socket.socket(socket.AF_UNIX) as listener, restored():
        os.chdir(os.path.dirname(path))
        listener.bind(os.path.basename(path))


def _filled(path: str) -> None:
    os.mkdir(path)
    os.mkdir(f"{path}/below")


THINGS: Final[dict[str, Callable[[str], object]]] = {
    "FIFOs": os.mkfifo,
    "character devices": lambda path: os.mknod(path, 0o20666, os.makedev(1, 5)),
    "terminals": lambda path: os.mknod(path, 0o20666, os.makedev(5, 0)),
    "block devices": lambda path: os.mknod(path, 0o60666, os.makedev(7, 0)),
    "sockets": _socket,
    "sparse giants": _huge,
    "empty directories": os.mkdir,
    "directories": _filled,
}


@pytest.mark.parametrize("thing", THINGS)
def test_what_is_no_file_blocks_nothing_and_fills_nothing(
    ground: Ground,
    places: tuple[list[str], list[str]],
    low_levels: dict[str, str],
    judged: Callable[[Seen], None],
    thing: str,
) -> None:
    """CVE-2025-23267, CVE-2026-47262: paths of the shim are not regular files."""
    for kind in INSTALLED:
        image = ground.image()
        for path in places[1]:
            if not path.startswith("/dev/"):
                os.makedirs(os.path.dirname(image + path), exist_ok=True)
                THINGS[thing](image + path)
        before = time.monotonic()
        low_level = _runtime(low_levels, kind, "installed")
        seen = ground.run(image, *LOAD, low_level=low_level)
        assert time.monotonic() - before < 10
        judged(seen)
        if thing in {"directories", "empty directories", "sparse giants"}:
            assert "NVSHIM-E0309" in seen.refused or "NVSHIM-E0305" in seen.refused
        else:
            assert seen.refused == ""
            assert "libcuda.so.1 /" in seen.output
        used = sum(
            os.lstat(f"{top}/{name}").st_blocks * 512
            for top, _, names in os.walk(image)
            for name in names
        )
        assert used < 16 << 20


CONFS: Final = {
    "a cyclic include": b"include /etc/ld.so.conf\ninclude /etc/ld.so.conf.d/*.conf\n",
    "an include of everything": b"include /*\ninclude /*/*/*/*/*\ninclude /proc/*\n" * 900,
    "bytes": bytes(range(256)) * 200,
    "one line": b"/" * 60_000,
    "nothing": b"",
}
CACHES: Final = {
    "cut off": b"glibc-ld.so.cache1.1" + b"\xff" * 30,
    "many entries": b"glibc-ld.so.cache1.1" + b"\xff\xff\xff\x7f" + b"\0" * 1000,
    "old": b"ld.so-1.7.0\0" + b"\xff\xff\xff\xff" + b"\0" * 1000,
    "bytes": bytes(range(256)) * 4000,
}


@pytest.mark.parametrize("what", [*CONFS, *CACHES])
def test_files_of_the_loader_of_any_content_harm_nobody(
    ground: Ground, judged: Callable[[Seen], None], what: str
) -> None:
    """CVE-2025-23267: the shim runs no ldconfig, and parses its files as data."""
    image = ground.image()
    os.makedirs(f"{image}/etc/ld.so.conf.d")
    if what in CONFS:
        for name in ("ld.so.conf", "ld.so.conf.d/a.conf"):
            with open(f"{image}/etc/{name}", "wb") as file:
                file.write(CONFS[what])
    else:
        with open(f"{image}/etc/ld.so.cache", "wb") as file:
            file.write(CACHES[what])
    seen = ground.run(image, *LOAD)
    judged(seen)
    assert seen.refused == ""
    assert "libcuda.so.1 /" in seen.output


EVIL: Final = """
#include <fcntl.h>
#include <unistd.h>
__attribute__((constructor)) static void mark(void)
{
	int fd = open("%s", O_CREAT | O_WRONLY, 0644);
	(void)!write(fd, "loaded", 6);
}
unsigned la_version(unsigned v) { mark(); return v; }
void gconv(void) {}
void gconv_init(void) { mark(); }
"""


@pytest.mark.parametrize("kind", INSTALLED)
def test_variables_of_the_image_are_nobody_elses(
    ground: Ground,
    judged: Callable[[Seen], None],
    low_levels: dict[str, str],
    tmp_path: Path,
    kind: str,
) -> None:
    """CVE-2025-23266: the runtime and the NVML child do not get the image's variables."""
    mark = f"{tmp_path}/mark"
    source, library = tmp_path / "evil.c", tmp_path / "evil.so"
    source.write_text(EVIL % mark)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    image = ground.image()
    # The loader finds it by an absolute path on the host, and by relative ones from any directory.
    for place in ("evil.so", "usr/lib/evil.so"):
        os.makedirs(os.path.dirname(f"{image}/{place}"), exist_ok=True)
        shutil.copy(library, f"{image}/{place}")
    python = f"open({mark!r}, 'w').write('python')\n"
    modules = tmp_path / "modules"
    modules.mkdir()
    for name in ("sitecustomize.py", "usercustomize.py", "json.py", "pynvml.py", "ctypes.py"):
        (modules / name).write_text(python)
    (modules / "gconv-modules").write_text(f"module A// B// {library} 1\n")
    env = [
        "NVIDIA_VISIBLE_DEVICES=all",
        *(f"LD_PRELOAD={path}" for path in ("./evil.so", "evil.so", library)),
        f"LD_AUDIT={library}",
        f"LD_LIBRARY_PATH={modules}:.:/",
        "GLIBC_TUNABLES=glibc.malloc.check=3",
        f"GCONV_PATH={modules}",
        f"PYTHONPATH={modules}",
        f"PYTHONSTARTUP={modules}/json.py",
        f"PYTHONHOME={modules}",
        f"PYTHONUSERBASE={modules}",
        "PYTHONINSPECT=1",
        "PYTHONBREAKPOINT=json",
        f"BASH_ENV={modules}/x",
        f"NVIDIA_CTK_CONFIG_FILE_PATH={modules}/config.toml",
        f"NVSHIM_CONFIG={modules}/config.toml",
        f"XDG_CONFIG_HOME={modules}",
        f"XDG_RUNTIME_DIR={modules}",
        "NVIDIA_CTK_DEBUG=true",
        "GOMAXPROCS=999",
    ]
    spied = tmp_path / "spied"
    spy = tmp_path / "spy"
    real = _runtime(low_levels, kind, "installed")
    spy.write_text(
        "#!/bin/bash\n"
        "environment=$(tr '\\0' '\\n' </proc/$$/environ)\n"
        # List the descriptors before any fork, because forks create pipes.
        "fds=(); for fd in /proc/$$/fd/*; do [ -e $fd ] && fds+=($fd); done\n"
        'open=$(for fd in "${fds[@]}"; do echo "fd ${fd##*/} $(readlink $fd)"; done)\n'
        f'printf "%s\\n" "$environment" "$open" "cwd $PWD" >>{spied}\n'
        f'exec {real} "$@"\n'
    )
    spy.chmod(0o755)
    # Delete the cached inventory, so that the shim queries NVML again.
    shutil.rmtree(ground.node.state, ignore_errors=True)
    os.mkdir(ground.node.state, 0o700)
    seen = ground.run(image, "/usr/bin/true", env=env, low_level=str(spy))
    judged(seen)
    assert seen.record["node"]["nvml"] == "answered"
    assert not os.path.exists(mark)
    lines = spied.read_text().splitlines()
    names = {line.partition("=")[0] for line in lines if not line.startswith(("fd ", "cwd "))}
    fixed = {"PATH", "LANG", "PWD", "SHLVL", "_", "OLDPWD", "_CONTAINERS_"}
    # This one is containerd's own, which its shim passes on; it is not the image's.
    assert names - fixed <= {"GOMAXPROCS"}
    assert "GOMAXPROCS=999" not in lines
    assert not [line for line in lines if str(tmp_path) in line and not line.endswith("/spy")]
    # Descriptor 255 is the script that bash reads.
    opened = {line.split()[1] for line in lines if line.startswith("fd ")}
    assert {"0", "1", "2"} <= opened <= {"0", "1", "2", "255"}
    # The control: the library works when it is loaded.
    subprocess.run(["/bin/true"], env={"LD_PRELOAD": str(library)}, check=True)
    assert os.path.exists(mark)


@pytest.mark.parametrize("kind", INSTALLED)
def test_no_descriptor_is_there_to_stand_in(
    ground: Ground, judged: Callable[[Seen], None], low_levels: dict[str, str], kind: str
) -> None:
    """CVE-2024-21626: a container whose working directory is a descriptor's does not run."""
    low_level = _runtime(low_levels, kind, "newest")
    for number in (3, 7, 8, 12) if not THOROUGH else range(3, 40):

        def stand_in(spec: dict[str, Any], number: int = number) -> None:
            spec["process"]["cwd"] = f"/proc/self/fd/{number}"

        seen = ground.run(ground.image(), "/usr/bin/true", low_level=low_level, edit=stand_in)
        if not seen.refused:
            # crun fails only when it starts the program, which then prints nothing.
            assert kind == "crun"
            assert seen.output
    judged(ground.run(ground.image(), "/usr/bin/true", low_level=low_level))


def test_programs_of_the_host_cannot_be_overwritten(
    ground: Ground, judged: Callable[[Seen], None], low_levels: dict[str, str]
) -> None:
    """CVE-2019-5736, CVE-2024-0135: a container writes to every program that it can reach."""
    paths = [os.path.realpath(path) for path in ("/sbin/ldconfig", "/usr/bin/python3")]
    paths += [_runtime(low_levels, kind, release) for kind in INSTALLED for release in RELEASES]
    before = [_digest(path) for path in paths]
    loop = "for i in 1 2 3; do for p in /proc/[0-9]*; do : 2>/dev/null >>$p/exe; done; done"

    def in_the_hosts_pids(spec: dict[str, Any]) -> None:
        spaces = spec["linux"]["namespaces"]
        spec["linux"]["namespaces"] = [space for space in spaces if space["type"] != "pid"]

    for edit in (None, in_the_hosts_pids):
        script = f"({loop}) 2>/dev/null; true"
        seen = ground.run(ground.image(), "sh", "-c", script, edit=edit)
        assert seen.refused == ""
        if edit is None:
            judged(seen)
    assert [_digest(path) for path in paths] == before


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


# -- odd, and harmless ----------------------------------------------------------------------


def _whiteout(image: str, path: str) -> None:
    """A whiteout: overlayfs treats it as a deleted file."""
    os.makedirs(os.path.dirname(f"{image}{path}"), exist_ok=True)
    os.mknod(f"{image}{path}", 0o20000, os.makedev(0, 0))


def _distroless(image: str) -> None:
    for path in ("/usr/bin/sh", "/usr/bin/bash", "/usr/sbin/ldconfig", "/etc/ld.so.conf",
                 "/etc/passwd", "/etc/group", "/tmp", "/root"):  # fmt: skip
        _whiteout(image, path)


def _etc_elsewhere(image: str) -> None:
    put_link(image, "/etc", "usr/../usr/config")
    os.makedirs(f"{image}/usr/config")


def _opaque_etc(image: str) -> None:
    os.mkdir(f"{image}/etc")
    os.setxattr(f"{image}/etc", "trusted.overlay.opaque", b"y")


def _etc_of_another_user(image: str) -> None:
    os.mkdir(f"{image}/etc")
    os.chown(f"{image}/etc", 1234, 1234)
    os.chmod(f"{image}/etc", 0o500)


ODD: Final[dict[str, Callable[[str], None]]] = {
    "no etc": lambda image: _whiteout(image, "/etc"),
    "distroless": _distroless,
    "no cache": lambda image: _whiteout(image, "/etc/ld.so.cache"),
    "no dev": lambda image: _whiteout(image, "/dev"),
    "no run": lambda image: _whiteout(image, "/run"),
    "etc elsewhere": _etc_elsewhere,
    "empty etc": _opaque_etc,
    "etc of another user": _etc_of_another_user,
}


@pytest.mark.parametrize("oddity", ODD)
def test_an_odd_image_is_served_like_any_other(
    ground: Ground,
    judged: Callable[[Seen], None],
    low_levels: dict[str, str],
    oddity: str,
) -> None:
    number = list(ODD).index(oddity)  # each runtime has images of each kind, also read-only ones

    def shut(spec: dict[str, Any]) -> None:
        spec["root"]["readonly"] = number // 2 % 2 == 1

    image = ground.image()
    ODD[oddity](image)
    kind = INSTALLED[number % 2]
    seen = ground.run(image, *LOAD, low_level=_runtime(low_levels, kind, "newest"), edit=shut)
    judged(seen)
    assert seen.refused == ""
    assert seen.output.startswith("libcuda.so.1 /"), seen.output


@pytest.mark.parametrize("kind", INSTALLED)
def test_a_file_system_that_takes_no_writes_gets_none(
    ground: Ground, judged: Callable[[Seen], None], low_levels: dict[str, str], kind: str
) -> None:
    """CVE-2024-0133: the container starts and has its libraries."""
    image = ground.image()
    before = _tree_of(image)
    seen = ground.run(
        image, *LOAD, low_level=_runtime(low_levels, kind, "newest"), mount_options=("ro",)
    )
    judged(seen)
    assert seen.refused == ""
    assert seen.output.startswith("libcuda.so.1 /run/")
    assert _tree_of(image) == before


def _tree_of(directory: str) -> list[str]:
    return sorted(f"{top}/{name}" for top, _, names in os.walk(directory) for name in names)


@pytest.mark.parametrize(
    ("kind", "propagation"),
    [("runc", "rshared"), ("crun", "shared"), ("crun", "rslave"), ("runc", "rprivate")],
)
def test_no_mount_reaches_the_host_whatever_its_propagation(
    ground: Ground,
    judged: Callable[[Seen], None],
    low_levels: dict[str, str],
    tmp_path: Path,
    kind: str,
    propagation: str,
) -> None:
    """The host's mount table does not change, as it did by the params file of NVIDIA's hook."""
    seen_outside: list[list[str]] = []
    volume = tmp_path / "volume"
    volume.mkdir()

    def spread(spec: dict[str, Any]) -> None:
        spec["linux"]["rootfsPropagation"] = propagation
        spec["mounts"].append(
            {
                "destination": "/usr/share",
                "type": "bind",
                "source": str(volume),
                "options": ["rbind", "rw", propagation],
            }
        )

    watched = (ground.containerd.directory, ground.runtime_states, str(tmp_path))
    before = host_mounts(*watched)
    seen = ground.run(
        ground.image(),
        *LOAD,
        low_level=_runtime(low_levels, kind, "newest"),
        edit=spread,
        while_created=lambda _: seen_outside.append(host_mounts(*watched)),
    )
    assert seen.refused == ""
    assert "libcuda.so.1 /" in seen.output
    (during,) = seen_outside
    new = [point for point in during if point not in before]
    # With shared propagation, runc's mount of the container's root appears on the host.
    assert [point for point in new if not point.startswith(ground.containerd.directory)] == []
    assert settled(lambda: host_mounts(*watched), before) == before


def test_a_huge_list_of_users_costs_nothing(ground: Ground, judged: Callable[[Seen], None]) -> None:
    """CVE-2026-47262: the shim reads no file of the image to look up users."""
    image = ground.image()
    os.mkdir(f"{image}/etc")
    for name in ("passwd", "group", "nsswitch.conf"):
        _huge(f"{image}/etc/{name}")
    before = _memory(ground.shim)
    seen = ground.run(image, *LOAD)
    judged(seen)
    assert "NVSHIM-E1203" in seen.refused, "runc does, and gives up"
    assert _memory(ground.shim) - before < 16 << 10


def _memory(pid: int) -> int:
    """Return the peak memory of a process, in KiB."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))


# -- while it changes -----------------------------------------------------------------------

FLIPPER: Final = """
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>
int main(int argc, char **argv)
{
	unsigned long n = 0;
	for (;; n++) {
		if (renameat2(AT_FDCWD, argv[1], AT_FDCWD, argv[2], 2) && errno != ENOENT)
			return perror("renameat2"), 1;
		if (n == 1000)
			symlink("flipped", argv[3]);
	}
}
"""


@pytest.fixture(scope="module")
def flipper(workshop: str) -> str:
    """Build a static program that swaps two names, as fast as the kernel allows."""
    source, program = f"{workshop}/flip.c", f"{workshop}/flip"
    with open(source, "w", encoding="ascii") as file:
        file.write(FLIPPER)
    subprocess.run(["gcc", "-O1", "-static", "-o", program, source], check=True)
    return program


@contextmanager
def flipping(ground: Ground, program: str, volume: str, one: str, other: str) -> Iterator[None]:
    """Run a second container that swaps two names in ``volume``."""
    shutil.copy(program, f"{volume}/flip")
    runtime = Runtime(ground.containerd, OURS)
    mount = f"type=bind,src={volume},dst=/volume,options=rbind:rw"
    marker = f"{volume}/flipped"
    try:
        container = runtime.start(
            "/volume/flip", f"/volume{one}", f"/volume{other}", "/volume/flipped",
            flags=("--mount", mount),
        )  # fmt: skip
        deadline = time.monotonic() + 10
        while not os.path.lexists(marker):
            assert time.monotonic() < deadline, container.status
            time.sleep(0.01)
        yield
        assert container.status == "RUNNING"
    finally:
        runtime.close()
        for name in (marker, f"{volume}/flip"):
            if os.path.lexists(name):
                os.unlink(name)


@LONG
@pytest.mark.parametrize("kind", INSTALLED)
def test_a_volume_that_another_container_changes_leads_nowhere(
    ground: Ground,
    canary: Canary,
    judged: Callable[[Seen], None],
    low_levels: dict[str, str],
    flipper: str,
    tmp_path: Path,
    kind: str,
) -> None:
    """CVE-2021-30465, CVE-2025-23359, CVE-2026-24260: a shared volume over parent directories."""
    volume = tmp_path / "volume"
    for name in ("icd.d", "implicit_layer.d", "egl_vendor.d", "nvidia"):
        (volume / "real" / name).mkdir(parents=True)
    (volume / "other").symlink_to(f"{canary.path}/etc")
    volume.chmod(0o777)

    def share(spec: dict[str, Any]) -> None:
        for place in ("/etc/vulkan", "/usr/share/glvnd", "/usr/local/cuda"):
            spec["mounts"].append(
                {
                    "destination": place,
                    "type": "bind",
                    "source": str(volume),
                    "options": ["rbind", "rw"],
                }
            )

    image = ground.image()
    put_link(image, "/usr/share/nvidia", "/usr/share/glvnd/real")
    put_link(image, "/etc/OpenCL", "/etc/vulkan/real")
    low_level = _runtime(low_levels, kind, "newest")
    until = time.monotonic() + SECONDS / 2
    with flipping(ground, flipper, str(volume), "/real", "/other"):
        while time.monotonic() < until:
            judged(ground.run(image, "/usr/bin/true", low_level=low_level, edit=share))


@LONG
@pytest.mark.parametrize("kind", INSTALLED)
@pytest.mark.parametrize("path", ["/etc", MULTIARCH, "/usr/share"])
def test_a_rootfs_that_another_container_changes_leads_nowhere(
    ground: Ground,
    canary: Canary,
    low_levels: dict[str, str],
    flipper: str,
    workshop: str,
    kind: str,
    path: str,
) -> None:
    """CVE-2024-0132, CVE-2025-23359, CVE-2026-24260: the rootfs itself is the shared volume."""
    shared = f"{workshop}/shared-{kind}-{path.strip('/').replace('/', '-')}"
    subprocess.run(["cp", "-a", ground.base, shared], check=True)
    os.makedirs(f"{shared}{path}", exist_ok=True)
    os.symlink(canary.path + path, f"{shared}/other")
    low_level = _runtime(low_levels, kind, "newest")
    until = time.monotonic() + SECONDS / 3
    outcomes: list[str] = []
    watched = (ground.containerd.directory, ground.runtime_states, canary.path, shared)
    mounts = host_mounts(*watched)
    try:
        with flipping(ground, flipper, shared, path, "/other"):
            while time.monotonic() < until or not outcomes:
                seen = ground.run("", "/usr/bin/true", low_level=low_level, rootfs=shared)
                assert not canary.is_dead, seen.refused
                assert "Traceback" not in seen.refused
                outcomes.append(seen.refused)
        assert settled(lambda: host_mounts(*watched), mounts) == mounts
    finally:
        shutil.rmtree(shared, ignore_errors=True)
