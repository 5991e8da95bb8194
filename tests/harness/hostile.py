"""Run hostile images in real containers, and observe their effects from outside.

A :class:`Canary` is the target of an image's links. A :class:`Ground` is a containerd with our shim
and a simulated node. An image is a directory there, stacked on a harmless one with overlayfs as a
snapshotter would do it, so it may hold anything that a file system can: FIFOs, devices, sockets.
:meth:`Ground.run` runs a GPU container of the image and returns what happened.

One shim, that of an idle container, runs all containers of a ground. It is observed as long as it
runs, and it may keep nothing of one image when the next container starts.
"""

from __future__ import annotations

import functools
import glob
import json
import os
import re
import stat
import subprocess
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from tests.harness import api
from tests.harness.runtime import OURS, Runtime, new_name
from tests.harness.waiting import eventually
from tests.unit.hooks.image.images import tree
from tools.images import glibc, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from integration.simulated import SimulatedNode
    from tools.containerd import PrivateContainerd

GROUP: Final = "io.containerd.runc.v2.group"
MULTIARCH: Final = "/usr/lib/x86_64-linux-gnu"

ALL_OF_IT: Final = ("NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=all")

# Targets of links that try to escape. {path} is the link's path; {up} leads from there to the root.
WAYS_OUT: Final = {
    "absolute": "{canary}{path}",
    "absolute, to nothing yet": "{canary}/new",
    "up and up": "../../../../../../../../../../../../../../../../../../../..{canary}{path}",
    "up from the image": "{up}canary{path}",
    "through procfs": "/proc/self/root{canary}{path}",
    "through init's procfs": "/proc/1/root{canary}{path}",
    "through a working directory": "/proc/self/cwd",
    "through a descriptor": "/proc/self/fd/0",
    "into procfs": "/proc/sys/kernel",
    "into sysfs": "/sys/kernel",
    "to the root": "/",
    "to itself": "{path}",
    "to its directory": ".",
    "to nothing": "/nowhere/at/all",
    "to a place of the machine": "/tmp",
}


class Canary:
    """A tree of the host that nothing may touch. It records every byte and time of its files.

    Args:
        like: paths that also exist in it, so that a link into it finds a file.
    """

    def __init__(self, path: str, like: Sequence[str] = ()) -> None:
        self.path = path
        for name in ("/etc/ld.so.conf.d/x.conf", f"{MULTIARCH}/libc.so.6", "/etc/ld.so.cache"):
            self._put(name)
        for name in like:
            if not os.path.lexists(path + name):
                self._put(name)
        self._before = self.fingerprint()

    def fingerprint(self) -> object:
        """Return everything about it that a write would change."""
        times = {name: os.lstat(self.path + name).st_ctime_ns for name in ("", *tree(self.path))}
        return tree(self.path), times

    @property
    def is_dead(self) -> bool:
        """Return whether anything in it has changed."""
        return self.fingerprint() != self._before

    def target(self, way: str, path: str) -> str:
        """Return the target of a link at ``path`` of an image that leads here by one way out."""
        up = "../" * path.count("/")
        return WAYS_OUT[way].format(canary=self.path, path=path, up=up)

    def _put(self, name: str) -> None:
        os.makedirs(os.path.dirname(self.path + name), exist_ok=True)
        with open(self.path + name, "wb") as file:
            file.write(b"canary")


@dataclass(frozen=True, slots=True)
class Seen:
    """The result of running a container."""

    refused: str = ""  # why it was not created or not started; "" if it was
    output: str = ""  # what the container wrote
    # config.json as the low-level runtime had it; empty if it was not created
    spec: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)  # nvidia.json, or empty
    mounts: str = ""  # mountinfo of the container's own mount namespace, or empty


class Ground:
    """Runs hostile images as containers.

    Args:
        containerd: a running containerd.
        node: has the GPUs that containers request; the shim's configuration names it.
        directory: where images are created, on a file system that overlayfs supports.

    Attributes:
        base: the harmless image.
        shim: the pid of the shim that serves all of the containers.
        runtime_states: the state directories of runc and crun.
    """

    def __init__(self, containerd: PrivateContainerd, node: SimulatedNode, directory: str) -> None:
        self.containerd = containerd
        self.runtime_states = f"/run/containerd/runc/{containerd.namespace}"
        self.node = node
        self.base = unpack(glibc().tree, f"{directory}/base")
        self._directory = directory
        self._images = 0
        self.shim = 0
        self._idle = new_name("idle")
        self._group = new_name("ground")
        # As containerd makes it: with tmpfs on /dev and /run, and procfs and sysfs masked.
        self._spec = Runtime(containerd, OURS).spec("true")

    def __enter__(self) -> Self:
        before = set(self.containerd.shim_pids())
        try:
            self._create(
                self._idle, self._overlay(self.image()), spec=self.spec("sleep", "1000", env=())
            )
            api.start_task(self.containerd, self._idle)
            (self.shim,) = set(self.containerd.shim_pids()) - before
        except BaseException:
            self._remove(self._idle)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove(self._idle)

    def image(self) -> str:
        """Create an empty image: the files in this directory are stacked on the harmless image."""
        self._images += 1
        upper = f"{self._directory}/image-{self._images}/upper"
        os.makedirs(upper)
        os.mkdir(f"{self._directory}/image-{self._images}/work")
        return upper

    def spec(self, *command: str, env: Sequence[str] = ALL_OF_IT) -> dict[str, Any]:
        """Create a spec, as containerd makes it, for a container of the ground's pod."""
        spec: dict[str, Any] = json.loads(json.dumps(self._spec))
        spec["process"]["args"] = list(command)
        spec["process"]["env"] += env
        spec["annotations"] = {GROUP: self._group}
        return spec

    def run(
        self,
        upper: str,
        *command: str,
        env: Sequence[str] = ALL_OF_IT,
        low_level: str = "",
        edit: Callable[[dict[str, Any]], object] | None = None,
        mount_options: tuple[str, ...] = (),
        rootfs: str = "",
        while_created: Callable[[int], object] | None = None,
    ) -> Seen:
        """Create a container of an image, run it until it exits, and remove it.

        Args:
            command: what it runs.
            low_level: path of the low-level runtime; the shim's default if empty.
            edit: changes the spec before containerd gets it.
            mount_options: further options of the rootfs's mount.
            rootfs: a whole root file system in place of the image, mounted as it is.
            while_created: called with init's pid before it is started.
        """
        name = new_name("hostile")
        spec = self.spec(*command, env=env)
        if edit is not None:
            edit(spec)
        stdout = f"{self._directory}/{name}.out"
        mount = ("bind", rootfs, ("rbind", "rw")) if rootfs else self._overlay(upper, mount_options)
        try:
            self._create(name, mount, spec=spec, low_level=low_level, stdout=stdout)
        except api.ApiRefused as error:
            self._remove(name)
            return Seen(refused=str(error))
        try:
            seen = self._look(name, while_created)
        finally:
            self._remove(name)
        # Wait is answered at the exit; what was written until then is in the file by Delete.
        with open(stdout, encoding="utf-8", errors="replace") as file:
            return replace(seen, output=file.read())

    def _look(self, name: str, while_created: Callable[[int], object] | None) -> Seen:
        bundle = self.containerd.bundle(name)
        with open(f"{bundle}/init.pid", encoding="ascii") as file:
            pid = int(file.read())
        with open(f"{bundle}/config.json", "rb") as file:
            spec = json.loads(file.read())
        record: dict[str, Any] = {}
        with suppress(FileNotFoundError), open(f"{bundle}/nvidia.json", "rb") as file:
            record = json.loads(file.read())
        with open(f"/proc/{pid}/mountinfo", encoding="utf-8", errors="replace") as file:
            mounts = file.read()
        if while_created is not None:
            while_created(pid)
        refused = ""
        try:
            api.start_task(self.containerd, name)
            api.wait_for_task(self.containerd, name)
        except api.ApiRefused as error:
            refused = str(error)
        return Seen(refused, "", spec, record, mounts)

    def _create(
        self,
        name: str,
        mount: tuple[str, str, tuple[str, ...]],
        *,
        spec: Mapping[str, Any],
        low_level: str = "",
        stdout: str = "",
    ) -> None:
        cgroup = f"/{self.containerd.namespace}/{name}"
        spec = {**spec, "linux": {**spec["linux"], "cgroupsPath": cgroup}}
        encoded = json.dumps(spec).encode()
        api.create_container(self.containerd, name, runtime=OURS, spec=encoded)
        if stdout:
            stdout = f"file://{stdout}"
        api.create_task(
            self.containerd,
            name,
            mounts=[mount],
            options=api.runc_options(binary=low_level) if low_level else b"",
            stdout=stdout,
            stderr=stdout,
        )

    def _overlay(
        self, upper: str, options: tuple[str, ...] = ()
    ) -> tuple[str, str, tuple[str, ...]]:
        layers = (
            f"lowerdir={self.base}",
            f"upperdir={upper}",
            f"workdir={os.path.dirname(upper)}/work",
        )
        return ("overlay", "overlay", (*layers, *options))

    def _remove(self, name: str) -> None:
        self.containerd.ctr_argv(name)  # so that its traces are looked for
        try:
            api.delete_task(self.containerd, name)
        except api.ApiRefused:
            self.containerd.ctr("tasks", "rm", "--force", name, check=False)
        with suppress(api.ApiRefused):
            api.delete_container(self.containerd, name)


def put_link(image: str, path: str, target: str) -> None:
    """Put a link at ``path`` of an image that is stacked on another."""
    os.makedirs(os.path.dirname(image + path), exist_ok=True)
    os.symlink(target, image + path)


# Where other software mounts, and the shim never does.
_OF_OTHERS: Final = (
    "/tmp/",
    "/dev/shm/",
    "/run/netns/",
    "/run/containerd/runc/",  # runc before 1.2 mounts itself there for a moment
    "/run/docker/",
    "/var/lib/docker/",
    "/var/lib/containerd/",
)


def host_mounts(*ours: str) -> list[str]:
    """Return the mount points of the host, as this process sees them.

    Args:
        ours: directories to include although other software mounts there.
    """
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        points = [f"{line.split()[4]}/" for line in file]
    others = (f"{tempfile.gettempdir()}/", *_OF_OTHERS)
    watched = tuple(f"{directory}/" for directory in ours)
    return sorted(
        point for point in points if not point.startswith(others) or point.startswith(watched)
    )


def foreign_mounts(seen: Seen, *, allowed: Sequence[str]) -> list[str]:
    """Return the host's files and directories in a container that are not below ``allowed``.

    They come from the container's mountinfo: mounts of the host's disk, by the path on that disk.
    """
    disk = os.stat(allowed[0]).st_dev
    number = f"{os.major(disk)}:{os.minor(disk)}"
    tops = [_place_on_disk(path) for path in allowed]
    found = []
    for line in seen.mounts.splitlines():
        words = line.split()
        place = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), words[3])
        if words[2] == number and not any(
            place == top or place.startswith(f"{top}/") for top in tops
        ):
            found.append(line)
    return found


def _place_on_disk(path: str) -> str:
    """Return a path relative to the root of its file system, which may be mounted anywhere."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        mounts = [line.split()[3:5] for line in file]
    # The last mount at a point is on top.
    root, point = max(
        (
            (root.rstrip("/"), point.rstrip("/"))
            for root, point in reversed(mounts)
            if f"{path}/".startswith(f"{point.rstrip('/')}/")
        ),
        key=lambda mount: len(mount[1]),
    )
    return f"{root}{path.removeprefix(point)}"


def foreign_sources(
    seen: Seen, before: Mapping[str, Any], *, driver_root: str, allowed: Sequence[str]
) -> list[str]:
    """Return the sources of added mounts that are not as they should be.

    Args:
        before: the spec before the injection.
        driver_root: a source below it has to be one of its files, by path and by inode.
    """
    driver = _inodes(driver_root)
    there = [mount["destination"] for mount in before["mounts"]]
    foreign = []
    for mount in seen.spec["mounts"]:
        source = mount["source"]
        if mount["destination"] in there or f"{source}/".startswith(
            tuple(f"{top}/" for top in allowed)
        ):
            continue
        found = os.lstat(source)
        is_ours = (found.st_dev, found.st_ino) in driver and not stat.S_ISLNK(found.st_mode)
        if not is_ours or not source.startswith(f"{driver_root}/"):
            foreign.append(source)
    return foreign


@functools.cache
def _inodes(top: str) -> frozenset[tuple[int, int]]:
    """Return every file and directory below ``top``, by device and inode."""
    found = (
        os.lstat(f"{directory}/{name}")
        for directory, names, files in os.walk(top)
        for name in (".", *names, *files)
    )
    return frozenset((seen.st_dev, seen.st_ino) for seen in found)


# strace -y: call(first argument, the rest; a descriptor is 5</where/it/is>, the working
# directory AT_FDCWD</where/it/is>
_CALL: Final = re.compile(r'^(\w+)\((?:(AT_FDCWD|\d+)<([^>]*)>, )?(?:"((?:[^"\\]|\\.)*)")?(.*)$')


@contextmanager
def traced(pid: int, log: str) -> Iterator[None]:
    """Log the file system calls of a process and its forks, but not those of programs they exec."""
    # Appended: a test starts so many processes that pids recur, and each pid has one file.
    argv = ["strace", "-ff", "-A", "-b", "execve", "-y", "-s", "4096", "-e", "trace=%file"]
    argv += ["-o", log, "-p", str(pid)]
    # strace prints a line for each process. A pipe, which is not read meanwhile, would be full
    # after a thousand; then strace would block, and with it everything that it traces.
    messages = f"{log}-messages"
    with (
        open(messages, "w", encoding="utf-8") as file,
        subprocess.Popen(argv, stderr=file) as tracer,
    ):
        try:
            eventually(lambda: "attached" in Path(messages).read_text("utf-8"), "it is traced")
            yield
        finally:
            tracer.terminate()


def calls_below(log: str, rootfs: str) -> tuple[list[str], int]:
    """Find the calls that access something below a rootfs in a way that is not allowed.

    Allowed are openat2 with RESOLVE_IN_ROOT and RESOLVE_NO_MAGICLINKS on the root itself, and
    single names, without following links, in a directory that was opened like that.

    Args:
        rootfs: a pattern of the roots' paths.

    Returns:
        The lines that are not allowed, and the number of allowed ones.
    """
    root = re.compile(f"({rootfs})(/.*)?")
    bad, good = [], 0
    for each in glob.glob(f"{glob.escape(log)}.*"):
        for line in Path(each).read_text(encoding="utf-8", errors="replace").splitlines():
            match = _CALL.match(line)
            if match is None or match[4] is None:
                continue
            name, _, directory, path, rest = match.groups()
            whole = path if path.startswith("/") else f"{directory or ''}/{path}"
            inside = root.fullmatch(os.path.normpath(whole))
            held = directory is not None and root.fullmatch(directory) is not None
            if not held and (inside is None or not inside[2]):
                continue
            if name == "openat2":
                allowed = "RESOLVE_NO_MAGICLINKS|RESOLVE_IN_ROOT" in rest and held
            else:
                allowed = held and "/" not in path
                if name == "openat":
                    allowed = allowed and "O_NOFOLLOW" in rest
            good += allowed
            if not allowed:
                bad.append(line.rstrip())
    return bad, good


def descriptors(pid: int) -> list[str]:
    """Return the open files of a process, in order."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return sorted(re.sub(r":\[\d+\]", "", name) for name in found)
