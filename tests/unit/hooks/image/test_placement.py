"""Golden table of placement: how each plan changes each image.

``placement.json`` has for each case the changes in the image, the files that are staged next to it
if it is read-only, and the mounts; or the error.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from api.errors import NvshimError, type_name
from hooks.image.ldcache import Cache, parse, serialise
from hooks.image.rootfs_errors import DirectoryInTheWay
from hooks.plan import CachedLibrary, Device, File, Link, LinkDirectory, Mount, Plan, ProcFile
from hooks.words import Arch
from tests.unit.hooks.golden import Golden, mounted
from tests.unit.hooks.image.images import (
    Make,
    alpine,
    debian,
    device,
    fedora,
    fill,
    put_in,
    scratch,
    to,
    tree,
)

GOLDEN = Golden("placement.json")
HOME = "/usr/lib/x86_64-linux-gnu"
SCRATCH = "/run/containerd-shim-nvidia/x86_64"
COMPAT = "/usr/local/cuda-13.1/compat"
CACHE, CONF, MUSL = "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld-musl-x86_64.path"
DROP_IN = "/etc/ld.so.conf.d/00-containerd-shim-nvidia.conf"
PROFILE = "/etc/nvidia/rc.d/10-container.conf"
DEV: dict[str, Any] = {"destination": "/dev", "type": "tmpfs", "options": ["nosuid"]}
RUN: dict[str, Any] = {"destination": "/run", "type": "tmpfs"}


def volume(destination: str, **more: Any) -> dict[str, Any]:
    return {"destination": destination, "type": "bind", "source": "/srv", **more}


def cached(soname: str, path: str, arch: Arch = Arch.X86_64) -> CachedLibrary:
    return CachedLibrary(soname, path, arch)


def driver(home: str = HOME, **more: Any) -> Plan:
    """Return a plan with one library and its links; a real plan has dozens."""
    return Plan(
        mounts=(Mount("/etc/hostname", f"{home}/libcuda.so.535.1"), *more.pop("mounts", ())),
        links=(
            Link(f"{home}/libcuda.so.1", "libcuda.so.535.1"),
            Link(f"{home}/libcuda.so", "libcuda.so.1"),
            *more.pop("links", ()),
        ),
        libraries=(
            *more.pop("first", ()),
            cached("libcuda.so.1", f"{home}/libcuda.so.1"),
        ),
        **more,
    )


def compat(home: str = HOME) -> Plan:
    """Return a plan in which the image's own libcuda takes precedence."""
    first = (cached("libcuda.so.1", f"{COMPAT}/libcuda.so.590.1"),)
    return driver(home, first=first, first_directories=(COMPAT,))


def searched(*directories: str) -> Plan:
    return driver(library_directories=directories)


LINKS = (("pci-0000:07:00.0-card", "../card0"), ("pci-0000:07:00.0-render", "../renderD128"))


def linked(path: str, links: tuple[tuple[str, str], ...] = LINKS) -> Plan:
    return Plan(link_directories=(LinkDirectory(path, links),))


MANIFESTS = Plan(
    mounts=(
        Mount("/etc/hostname", "/usr/share/vulkan/icd.json"),
        Mount("/etc/hostname", "/usr/share/of-a-cdi-spec", required=True),
    )
)
SMALL = Plan(
    files=(File(PROFILE, b"profile", reason="profile"),),
    link_directories=(LinkDirectory("/dev/dri/by-path", LINKS, "by path"),),
    proc_files=(ProcFile("/proc/driver/nvidia/params", b"ModifyDeviceFiles: 0\n", "no nodes"),),
)
MODULES = "/usr/lib64/xorg/modules"
GRAPHICS = Plan(
    mounts=(
        Mount("/etc/hostname", "/usr/share/vulkan/icd.d/nvidia.json"),
        Mount("/etc", "/usr/share/vulkan/layers"),
        Mount("/etc/hostname", f"{MODULES}/libglx.so.535.1"),
    ),
    links=(Link(f"{MODULES}/libglx.so", "libglx.so.535.1"),),
    files=(File(PROFILE, b"profile"),),
)
# The targets of links in place of directories, of which something is missing.
DANGLING = {
    "absolute": "/opt/graphics",
    "relative": "../../opt/graphics",
    "of two links": "/srv/link",
    "that leaves the image": "../../../../../../../opt/graphics",
    "to a tmpfs": "/run/graphics",
    "to procfs": "/proc/self/root/opt",
}
NODE = driver(devices=(Device("/dev/nvidia0", 195, 0),))
UNUSABLE_CACHES: dict[str, Make] = {
    "garbage": b"garbage" * 100,
    "a FIFO": os.mkfifo,
    "a device": device,
    "a dangling link": to("/nowhere"),
    "a cycle": to(CACHE),
    "a magic link": to("/proc/self/exe"),
}
OF_A_CONTAINER = serialise(Cache().merge([cached("libown.so.1", "/usr/local/lib/libown.so.1")]))
BIG = b"x" * (2 << 20)


def required(*mounts: tuple[str, str, str]) -> Plan:
    """Return a plan with mounts of a CDI file: type, source, destination."""
    made = (Mount(source, at, reason="v.com/d=0", kind=kind, required=True)
            for kind, source, at in mounts)  # fmt: skip
    return Plan(mounts=tuple(made), links=(Link("/run/a", "b"),))


@dataclass(frozen=True)
class Case:
    """A case, by default on a Debian image with its own loader cache."""

    plan: Plan
    files: Mapping[str, Make] | None = None
    image: Callable[[str], str] = debian
    mounts: Sequence[dict[str, Any]] = ()
    before: Plan | None = None
    arches: Sequence[Arch] = (Arch.X86_64,)
    library_path: str = ""
    read_only: bool = False

    def make(self, root: str) -> str:
        self.image(root)
        if self.image is debian and not self.read_only:
            fill(root, {CACHE: OF_A_CONTAINER})
        fill(root, self.files or {})
        if self.before:
            self.place(root, self.before)
        return root

    def place(self, root: str, plan: Plan) -> Any:
        return put_in(root, plan, self.mounts, arches=self.arches, library_path=self.library_path)


def sealed(plan: Plan, files: Mapping[str, Make] | None = None, **more: Any) -> Case:
    """Make an image that is read-only; the container has tmpfs on /dev and /run."""
    return Case(plan, files, **{"mounts": (DEV, RUN), "read_only": True, **more})


def instead(make: Make) -> Make:
    """Return a function that removes the file before it makes another."""

    def made(path: str) -> None:
        os.unlink(path)
        fill("", {path: make})

    return made


def sized(size: int) -> Make:
    return lambda path: os.truncate(path, size)


def given(mode: int, uid: int, gid: int) -> Make:
    """Return a function that changes the mode and owner of a file."""

    def make(path: str) -> None:
        os.chmod(path, mode)
        os.chown(path, uid, gid)

    return make


def renamed(to_path: str) -> Make:
    return lambda path: os.rename(path, f"{path}{to_path}")


OPT = searched("/opt/nvidia")
# The last step fails: the cache's path is a directory.
FAILING: dict[str, Make] = {CACHE: instead(os.mkdir), f"{CACHE}/file": b"", CONF: os.unlink}
BEFORE_IT = driver(
    library_directories=("/opt/nvidia",),
    mounts=(
        Mount("/etc/hostname", f"{HOME}/libnvidia-ml.so.535.1"),
        Mount("/etc/hostname", "/usr/new/directories/file"),
    ),
)
CASES: dict[str, Case] = {
    "nothing": Case(Plan()),
    "library with its links": Case(driver()),
    "no cache": Case(driver(), {CACHE: os.unlink}),
    "no etc": Case(driver(), {"/etc": renamed("-other")}),
    **{
        f"cache that is {what}": Case(driver(), {CACHE: instead(make)})
        for what, make in UNUSABLE_CACHES.items()
    },
    "cache that is a link": Case(
        driver(), {"/usr/cache": OF_A_CONTAINER, CACHE: instead(to("/usr/cache"))}
    ),
    "cache of absurd size": Case(driver(), {CACHE: sized((8 << 20) + 1)}),
    "cache of 5 GiB": Case(driver(), {CACHE: sized(5 << 30)}),
    "cache of another's": Case(driver(), {CACHE: given(0o640, 5, 6)}),
    # A runtime would mount over the link's target, which may be anything.
    "link in place of a mount point": Case(
        driver(), {"/etc/shadow": b"secret", f"{HOME}/libcuda.so.535.1": to("/etc/shadow")}
    ),
    "file in place of a mount point": Case(driver(), {f"{HOME}/libcuda.so.535.1": b"its own"}),
    "directory in place of a mount point": Case(driver(), {f"{HOME}/libcuda.so.535.1": os.mkdir}),
    "mount of a directory": Case(Plan(mounts=(Mount("/etc", "/usr/share/nvidia"),))),
    **{
        f"directory with files in place of {name}": Case(driver(), {f"{HOME}/{name}/file": b"x"})
        for name in ("libcuda.so.535.1", "libcuda.so.1", "libcuda.so")
    },
    "big file and FIFO in place of links": Case(
        driver(), {f"{HOME}/libcuda.so.1": BIG, f"{HOME}/libcuda.so": os.mkfifo}
    ),
    # A tmpfs on /run hides the image's files there, and the runtime creates the mount points.
    "below what is mounted over": Case(
        Plan(
            mounts=(
                Mount("/etc/hostname", "/run/nvidia-persistenced/socket"),
                Mount("/etc/hostname", "/var/run/nvidia-fabricmanager/socket"),
                Mount("/etc/hostname", "/dev/nvidia"),
                Mount("/etc/hostname", "/var/dev/nvidia"),
            ),
            links=(Link("/dev/dri/by-path/pci-0-card", "card0"),),
        ),
        {"/var/run": to("/run"), "/dev": os.mkdir, "/var/dev": to("../dev")},
        mounts=[RUN],
    ),
    "directories that are searched anyway": Case(searched(HOME, "/usr/lib64", "/usr/lib")),
    "other directories": Case(searched(HOME, f"{HOME}/vdpau", "/opt/nvidia")),
    "no configuration of ldconfig": Case(OPT, {CONF: os.unlink}),
    **{
        f"configuration of ldconfig {text!r}": Case(OPT, {CONF: text})
        for text in (
            b"", b"/opt/lib\n", f"# include {DROP_IN}\n".encode(),
            b"include /etc/ld.so.conf.d/*.conf\n", b"  include ld.so.conf.d/*.conf # all\n",
        )
    },
    "32 bits": Case(
        Plan(
            libraries=(
                cached("libcuda.so.1", "/usr/lib64/libcuda.so.1"),
                cached("libcuda.so.1", "/usr/lib/libcuda.so.1", Arch.I386),
            )
        ),
        image=fedora,
        arches=(Arch.X86_64, Arch.I386),
    ),
    "no loader": Case(driver("/usr/lib"), image=scratch),
    "musl": Case(driver("/usr/lib"), image=alpine),
    **{
        f"musl with the path {text!r} and {', '.join(more) or 'nothing'} more": Case(
            driver("/usr/lib", library_directories=more), {MUSL: text} if text else {}, alpine
        )
        for text, more in (
            (b"", ("/opt/nvidia",)), (b"/lib:/usr/lib", ()), (b"/lib:/usr/lib\n", ("/opt/nvidia",)),
            (b"/lib\n/opt/own\n", ()),
        )
    },
    "no devices where dev is a link": Case(driver(), {"/dev": to("/etc")}),
    **{
        f"devices where dev is a link to {target}": Case(NODE, {"/dev": to(target)})
        for target in ("/etc", "../../outside", "nowhere", "/proc/self/root")
    },
    "failure where dev is a link": Case(NODE, {"/dev": to("/etc"), f"{HOME}/libcuda.so/file": b""}),
    **{
        f"failure at the end, and before it {what}": Case(
            BEFORE_IT,
            {
                **FAILING,
                f"{HOME}/libcuda.so.535.1": to(CONF),
                f"{HOME}/libnvidia-ml.so.535.1": os.mkdir,
                **({f"{HOME}/libcuda.so.1": make, f"{HOME}/libcuda.so": make} if make else {}),
            },
        )
        for what, make in {
            "files": b"the image's own",
            "big files": BIG,
            "links": to("libcuda.so.1-own"),
            "FIFOs": os.mkfifo,
            "nothing": None,
        }.items()
    },
    **{
        f"link {path} to {target!r}": Case(Plan(links=(Link(path, target),)))
        for path, target in (
            ("/usr/lib/a", "../../../../etc/shadow"), ("/usr/lib/a", "b/c"), ("/usr/lib/a", ".."),
            ("/usr/lib/a", ""), ("/usr/lib/a", "/usr/../etc"), ("/usr/lib/a", "a\0b"),
            ("/usr/lib/a", "\ud800"), ("/usr/../etc/a", "b"), ("usr/lib/a", "b"),
        )
    },
    **{
        f"directory {directory!r}": Case(searched(directory))
        for directory in ("relative", "/a b", "/a:b", "/a\nb", "/a/../b", "/", "/a=b")
    },
    "first directory with a space": Case(Plan(first_directories=("/usr/local/a b",))),
    "mount point with a way out": Case(
        Plan(mounts=(Mount("/etc/hostname", "/usr/../../etc/canary"),))
    ),
    "the image's libcuda first": Case(compat()),
    "the image's libcuda first, and nothing included": Case(compat(), {CONF: b"/opt/lib\n"}),
    "the image's libcuda first no more": Case(driver(), before=compat()),
    "the image's libcuda first, with musl": Case(compat("/usr/lib"), image=alpine),
    "the image's libcuda first, with a path of musl's": Case(
        compat("/usr/lib"), {MUSL: b"/opt/lib:/usr/lib\n"}, alpine
    ),
    "small files": Case(SMALL, mounts=[DEV]),
    "links outside of any tmpfs": Case(linked("/opt/links"), mounts=[DEV]),
    "small files below volumes": Case(SMALL, mounts=(volume("/dev"), volume("/etc/nvidia"))),
    "small files on a read-only tmpfs": Case(SMALL, mounts=[{**DEV, "options": ["ro"]}]),
    "volume over a tmpfs": Case(SMALL, mounts=(DEV, volume("/dev/dri"))),
    "tmpfs that is covered later": Case(
        SMALL, mounts=({**DEV, "destination": "/dev/dri"}, volume("/dev"))
    ),
    "tmpfs on a volume": Case(SMALL, mounts=(volume("/dev"), {**DEV, "destination": "/dev/dri"})),
    "small file on a tmpfs": Case(SMALL, mounts=(DEV, {**DEV, "destination": "/etc/nvidia"})),
    **{
        f"manifests in a volume that is {what}": Case(MANIFESTS, changes, mounts=mounts)
        for what, changes, mounts in (
            ("shared", {}, (volume("/usr/share", options=["rbind", "rshared"]),)),
            *(
                (f"shared, by a link to {what}", {"/usr/share": to("/srv/share"), **there},
                 (volume("/srv/share", options=["bind", "shared"]),))
                for what, there in (("it", {"/srv/share": os.mkdir}), ("nothing yet", {}))
            ),
            ("the host's to see", {}, (volume("/usr/share", options=["rbind", "rslave"]),)),
            ("in a shared one", {},
             (volume("/usr", options=["rbind", "rshared"]), volume("/usr/share"))),
            ("private in a shared one", {},
             (volume("/usr", options=["rbind", "rshared"]),
              volume("/usr/share", options=["rbind", "rprivate"]))),
            ("over a shared one", {},
             (volume("/usr/share", options=["rbind", "rshared"]),
              volume("/usr", options=["rbind", "rprivate"]))),
        )
    },
    "read-only, manifests in a shared volume": sealed(
        MANIFESTS, mounts=(RUN, volume("/usr/share", options=["rbind", "rshared"]))
    ),
    **{
        f"directories that are a link {what}": Case(
            GRAPHICS,
            {
                "/srv/link": to("/opt/graphics"),
                **{
                    path: to(target)
                    for path in ("/usr/share/vulkan", "/usr/lib64/xorg", "/etc/nvidia")
                },
            },
            mounts=[RUN],
        )
        for what, target in DANGLING.items()
    },
    **{
        f"directories that are {what}": Case(
            GRAPHICS, {"/usr/share/vulkan": make, "/usr/lib64/xorg": make, "/etc/nvidia": make}
        )
        for what, make in {
            "links to links to themselves": to("/usr/share/vulkan"),
            "links above what is missing": to("/nowhere/../opt"),
            "files": b"",
        }.items()
    },
    "directory that is a file, right where files go": Case(
        GRAPHICS, {"/usr/share/vulkan/icd.d": b"", MODULES: b"", "/etc/nvidia/rc.d": b""}
    ),
    "shared volume over one file, beside links": Case(
        GRAPHICS, {},
        mounts=[RUN, volume(f"{MODULES}/libglx.so.535.1", options=["rbind", "rshared"])],
    ),
    "required mount where links lead to themselves": Case(
        required(("bind", "/etc/hostname", "/opt/vendor/x")), {"/opt/vendor": to("vendor")}
    ),
    "file in place of a directory under a tmpfs": Case(
        Plan(mounts=(Mount("/etc/hostname", "/run/a/b/socket"),)), {"/run/a": b""}, mounts=[RUN]
    ),
    "link to nowhere on the way": Case(SMALL, {"/etc/nvidia": to("/nowhere")}, mounts=[DEV]),
    "small file where a directory is": Case(
        replace(SMALL, files=(File("/etc/first", b"x"), *SMALL.files)),
        {f"{PROFILE}/in the way": b""},
        mounts=[DEV],
    ),
    **{
        f"small file {path}": Case(Plan(files=(File(path, b""),))) for path in ("/etc/../x", "/")
    },
    "file of procfs that is relative": Case(Plan(proc_files=(ProcFile("relative", b""),))),
    **{
        f"directory of links with {name!r} to {target!r}": Case(linked("/dev/x", ((name, target),)))
        for name, target in (("a/b", "c"), ("..", "c"), ("a", ""), ("a", "b\0"))
    },
    "read-only, small files": sealed(
        replace(
            SMALL,
            files=(*SMALL.files, File("/etc/not-there", b"")),
            link_directories=(
                *SMALL.link_directories,
                LinkDirectory("/opt/links", LINKS),
                LinkDirectory("/opt/other", LINKS),
            ),
        ),
        {PROFILE: b"of the image", "/opt/links": os.mkdir},
    ),
    "read-only, with a cache": sealed(driver(SCRATCH), {CACHE: b"anything"}),
    **{
        f"read-only, without a cache, {path or 'nothing'} in the environment": sealed(
            driver(SCRATCH), library_path=path
        )
        for path in ("", "/opt/lib", f"::{SCRATCH}:/a")
    },
    "read-only, other directories": sealed(
        driver(SCRATCH, library_directories=(f"{SCRATCH}/vdpau", "/usr/lib"))
    ),
    "read-only, musl": sealed(driver(SCRATCH), image=alpine),
    "read-only, musl with a path": sealed(driver(SCRATCH), {MUSL: b"/lib"}, image=alpine),
    "read-only, the image's libcuda first": sealed(compat(SCRATCH), library_path="/opt/own"),
    "read-only, the image's libcuda first in a cache": sealed(compat(SCRATCH), {CACHE: b""}),
    "read-only, without a tmpfs": sealed(driver(), mounts=()),
    "read-only, nothing and no tmpfs": sealed(Plan(), mounts=()),
    "read-only, no mount points": sealed(
        driver(
            SCRATCH,
            mounts=(
                Mount("/etc/hostname", "/usr/bin/nvidia-smi"),
                Mount("/etc/hostname", "/usr/bin/nvidia-debugdump"),
                Mount("/etc", "/usr/share/nvidia"),
                Mount("/etc/hostname", "/usr/share"),
                Mount("/etc/hostname", "/run/nvidia-persistenced/socket"),
            ),
            links=(Link("/usr/a", "b"), Link("/usr/c", "d")),
        ),
        {"/usr/bin/nvidia-smi": b"", "/usr/share/nvidia/file": b"", "/usr/a": to("b")},
    ),
    **{
        f"read-only, required mount {what}": sealed(
            required(*mounts), {"/opt/vendor": os.mkdir}, image=scratch
        )
        for what, mounts in {
            "below another": (
                ("bind", "/etc", "/opt/vendor"),
                ("bind", "/etc/hostname", "/opt/vendor/hostname"),
            ),
            "below a tmpfs of its own": (
                ("tmpfs", "tmpfs", "/opt/vendor"),
                ("bind", "/etc/hostname", "/opt/vendor/hostname"),
            ),
            "on the container's tmpfs": (("bind", "/etc/hostname", "/run/vendor/x"),),
            "without a mount point": (("bind", "/etc/hostname", "/opt/vendor/hostname"),),
            "that another has no place for": (
                ("bind", "/usr", "/opt/vendor"),
                ("bind", "/etc/hostname", "/opt/vendor/hostname"),
            ),
            "of a file on a directory": (("bind", "/etc/hostname", "/opt/vendor"),),
        }.items()
    },
}  # fmt: skip
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")


@contextmanager
def taking_no_writes(root: str) -> Iterator[None]:
    subprocess.run(["mount", "--bind", "-o", "ro", root, root], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", root], check=True)


def looks(path: str) -> str:
    """Describe the file at a path, with its owner if that is not root."""
    status = os.lstat(path)
    mode = stat.S_IMODE(status.st_mode)
    owner = f" {status.st_uid}:{status.st_gid}" if status.st_uid or status.st_gid else ""
    if stat.S_ISLNK(status.st_mode):
        return f"-> {os.readlink(path)}{owner}"
    if not stat.S_ISREG(status.st_mode):
        return f"{stat.S_IFMT(status.st_mode):o} {mode:o}{owner}"
    with open(path, "rb") as file:
        content = file.read()
    text = repr(content.decode(errors="replace"))
    if path.endswith(CACHE):
        entries = parse(content).entries
        text = ", ".join(f"{e.soname.decode()} {e.path.decode()} {e.flags:x}" for e in entries)
    return f"{mode:o}{owner}: {text}"


def changed(before: Mapping[str, Any], root: str) -> dict[str, str]:
    after = tree(root)
    paths = sorted(path for path in {**before, **after} if before.get(path) != after.get(path))
    return {path: looks(root + path) if path in after else "removed" for path in paths}


def times(root: str) -> dict[str, int]:
    return {path: os.lstat(root + path).st_ctime_ns for path in tree(root)}


def outcome(case: Case, root: str) -> dict[str, Any]:
    before, descriptors = tree(root), os.listdir("/proc/self/fd")
    try:
        placed = case.place(root, case.plan)
    except NvshimError as error:
        assert tree(root) == before, "a failure takes everything back"
        assert not tree(f"{root}-staging"), "the staged files, too"
        return {"error": f"{type_name(error)}: {error}"}
    finally:
        assert os.listdir("/proc/self/fd") == descriptors
    shown = {
        "image": changed(before, root),
        "beside": changed({}, f"{root}-staging"),
        "mounts": [f"{mounted(mount)}: {mount.reason}" for mount in placed.mounts],
        "environment": [f"{name}={value}" for name, value in placed.environment],
        **{name: list(getattr(placed, name)) for name in ("written", "omitted", "proc_files")},
    }
    written = times(root)
    again = case.place(root, case.plan)
    assert again == replace(placed, written=()), "a second time nothing is written"
    assert times(root) == written
    return {name: value for name, value in shown.items() if value}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=as_root if CASES[name].read_only else ()) for name in CASES],
)
def test_plan_in_an_image(name: str, tmp_path: Path, usual_umask: None) -> None:
    case, root = CASES[name], f"{tmp_path}/image"
    case.make(root)
    with taking_no_writes(root) if case.read_only else nullcontext():
        found = outcome(case, root)
    GOLDEN.compare(name, json.loads(json.dumps(found).replace(root, "IMAGE")))


def test_staging_is_private_and_what_is_mounted_from_it_is_readable_to_all(root: str) -> None:
    put_in(root, SMALL, [DEV])
    modes = [stat.S_IMODE(os.stat(f"{root}-staging{path}").st_mode) for path in ("", "/file-0")]
    assert modes == [0o700, 0o755]


@contextmanager
def overlay(root: str) -> Iterator[tuple[str, str]]:
    """Mount the image as containerd does; return (merged directory, the container's layer)."""
    above = os.path.dirname(root)
    merged, upper, work = f"{above}/merged", f"{above}/upper", f"{above}/work"
    for directory in (merged, upper, work):
        os.mkdir(directory)
    options = f"lowerdir={root},upperdir={upper},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", merged], check=True)
    try:
        yield merged, upper
    finally:
        subprocess.run(["umount", merged], check=True)


@as_root
def test_on_an_overlay_the_container_s_layer_gets_only_what_is_written(root: str) -> None:
    fill(root, {f"{HOME}/libcuda.so.1": b"x" * 4096})
    image = tree(root)
    with overlay(root) as (merged, upper):
        placed = put_in(merged, driver())
        files = {path for path in tree(upper) if not os.path.isdir(upper + path)}
        assert files == set(placed.written)
        assert CACHE in files
    assert tree(root) == image


@as_root
def test_on_an_overlay_a_failure_takes_everything_back(root: str) -> None:
    blocked: dict[str, Make] = {f"{CACHE}/file": b""}
    fill(root, {f"{HOME}/libcuda.so.1": BIG, f"{HOME}/libcuda.so": os.mkfifo, **blocked})
    with overlay(root) as (merged, _):
        before = tree(merged)
        with pytest.raises(DirectoryInTheWay):
            put_in(merged, driver())
        assert tree(merged) == before
