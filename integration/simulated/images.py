"""Build small OCI images from files of this machine, without a registry.

A container on a simulated node needs an image with glibc and a dynamic loader, like those of CUDA
programs. An image is a value first (a tree of files and its configuration) and becomes an archive
that ``ctr images import`` reads::

    archive = write_archive("images.tar", [glibc()])
    containerd.ctr("images", "import", archive)
    containerd.ctr("run", "--rm", GLIBC, "first", "true")

Rules
- A tree maps a path without a leading slash to a file, a link or a directory; parent directories
  are added. Only the contents of files come from the machine, not owners or times.
- The same files give the same archive, byte for byte.
- Programs are where Debian has them since the /usr merge: /bin and /lib are links.

Source: OCI image-spec v1.1 (image-layout.md, config.md, layer.md); ldconfig(8), ld.so(8).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from integration.simulated.errors import ImageBuildFailed, SourceNotInstalled

GLIBC: Final = "nvshim.local/glibc:latest"

_SEARCH_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# The names of machines in Go, and so in the image specification.
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}

# Programs for looking around in a container.
_PROGRAMS: Final = (
    "bash", "cat", "dash", "env", "flock", "grep", "head", "id", "ldconfig", "ln", "ls", "mkdir",
    "mknod", "mv", "readlink", "rm", "sha256sum", "sleep", "sort", "stat", "stty", "touch", "true",
)  # fmt: skip

# Libraries of glibc that a driver's libraries need but the programs above do not. Since glibc 2.34
# most are empty, but they are still loaded by name.
_GLIBC_LIBRARIES: Final = (
    "libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1", "libutil.so.1",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class File:
    """A regular file."""

    content: bytes
    mode: int = 0o644


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link."""

    target: str


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory. Parent directories need not be listed."""

    mode: int = 0o755


Node = File | Link | Directory
Tree = dict[str, Node]


@dataclass(frozen=True, slots=True)
class Image:
    """An image with one layer."""

    name: str  # its name in containerd
    tree: Mapping[str, Node]
    # environment variables besides PATH; one named PATH replaces it
    environment: Mapping[str, str] = field(default_factory=dict)
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ("/bin/sh",)
    labels: Mapping[str, str] = field(default_factory=dict)

    def named(self, name: str, *, environment: Mapping[str, str] | None = None) -> Image:
        """Return the same image under another name, optionally with other variables."""
        if environment is None:
            environment = self.environment
        return replace(self, name=name, environment=environment)


def glibc() -> Image:
    """Return an image like those of CUDA programs: glibc, its loader, a shell, ldconfig.

    It has an ld.so.cache written by ldconfig.

    Raises:
        SourceNotInstalled: a program or a library is missing.
        ImageBuildFailed: ldconfig failed.
    """
    libraries = _multiarch_directory()
    tree = skeleton()
    for name in _PROGRAMS:
        path = find_program(name)
        directory = "usr/sbin" if os.path.basename(os.path.dirname(path)) == "sbin" else "usr/bin"
        tree[f"{directory}/{name}"] = read_file(path)
        tree.update(_needed(path))
    tree["usr/bin/sh"] = Link("dash")
    for path in glibc_libraries():
        tree.update(_library(path))
    tree["etc/ld.so.conf"] = File(b"include /etc/ld.so.conf.d/*.conf\n")
    tree["etc/ld.so.conf.d/libc.conf"] = File(b"/usr/local/lib\n")
    tree["etc/ld.so.conf.d/multiarch.conf"] = File(
        f"/usr/local/lib/{os.path.basename(libraries)}\n/{libraries}\n".encode()
    )
    tree["etc/ld.so.cache"] = _loader_cache(tree)
    return Image(GLIBC, tree)


def glibc_libraries() -> list[str]:
    """Return the paths of glibc libraries that a driver's libraries need and programs may not.

    Raises:
        SourceNotInstalled: this machine's programs do not use glibc.
    """
    libraries = _multiarch_directory()
    return [f"/{libraries}/{name}" for name in _GLIBC_LIBRARIES]


def write_archive(path: str, images: Iterable[Image]) -> str:
    """Write images as one OCI archive.

    Args:
        path: the archive; replaced atomically.
        images: the images. A shared layer is written once.
    """
    kept = tuple(images)  # keep the trees alive, because their ids are dictionary keys
    blobs: dict[str, bytes] = {}
    manifests = []
    layers: dict[int, bytes] = {}  # by the identity of the tree
    for image in kept:
        # Derived images share the tree, so it is packed only once.
        if id(image.tree) not in layers:
            layers[id(image.tree)] = pack(image.tree)
        manifests.append(_add_image(blobs, image, layers[id(image.tree)]))
    index = {"schemaVersion": 2, "mediaType": _media_type("index"), "manifests": manifests}
    files = {
        "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
        "index.json": _json(index),
        **{f"blobs/sha256/{digest}": blob for digest, blob in blobs.items()},
    }
    unfinished = f"{path}.{os.getpid()}"
    with open(unfinished, "wb") as file:
        file.write(pack({name: File(content) for name, content in files.items()}))
    os.rename(unfinished, path)
    return path


def unpack(tree: Mapping[str, Node], directory: str) -> str:
    """Write a tree into a directory, as a container's root without an image."""
    os.makedirs(directory, exist_ok=True)
    for path, node in _whole(tree):
        place = os.path.join(directory, path)
        match node:
            case File(content, mode):
                with open(place, "wb") as file:
                    file.write(content)
                os.chmod(place, mode)
            case Link(target):
                os.symlink(target, place)
            case Directory(mode):
                os.mkdir(place)
                os.chmod(place, mode)
    return directory


def _add_image(blobs: dict[str, bytes], image: Image, layer: bytes) -> dict[str, Any]:
    environment = {"PATH": _SEARCH_PATH, **image.environment}
    config = {
        "architecture": _architecture(),
        "os": "linux",
        "config": {
            "Env": [f"{name}={value}" for name, value in environment.items()],
            "Entrypoint": list(image.entrypoint),
            "Cmd": list(image.command),
            "Labels": dict(image.labels),
            "WorkingDir": "/",
        },
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": _media_type("manifest"),
        "config": _add_blob(blobs, _media_type("config"), _json(config)),
        "layers": [_add_blob(blobs, "application/vnd.oci.image.layer.v1.tar", layer)],
    }
    return {
        **_add_blob(blobs, _media_type("manifest"), _json(manifest)),
        "platform": {"architecture": _architecture(), "os": "linux"},
        "annotations": {
            "io.containerd.image.name": image.name,
            "org.opencontainers.image.ref.name": image.name.rpartition(":")[2],
        },
    }


def _add_blob(blobs: dict[str, bytes], media_type: str, blob: bytes) -> dict[str, Any]:
    digest = _digest(blob)
    blobs[digest.removeprefix("sha256:")] = blob
    return {"mediaType": media_type, "digest": digest, "size": len(blob)}


def pack(tree: Mapping[str, Node]) -> bytes:
    """Return the tree as a tar archive whose bytes depend only on the tree."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, node in _whole(tree):
            member = tarfile.TarInfo(path)
            content = None
            match node:
                case File(data, mode):
                    member.mode, member.size, content = mode, len(data), io.BytesIO(data)
                case Link(target):
                    member.type, member.mode, member.linkname = tarfile.SYMTYPE, 0o777, target
                case Directory(mode):
                    member.type, member.mode = tarfile.DIRTYPE, mode
            archive.addfile(member, content)
    return buffer.getvalue()


def _whole(tree: Mapping[str, Node]) -> list[tuple[str, Node]]:
    """Return the tree with parent directories, each before its contents."""
    whole: Tree = {}
    for path in tree:
        parent = os.path.dirname(path)
        while parent and parent not in whole:
            whole[parent] = Directory()
            parent = os.path.dirname(parent)
    whole.update(tree)
    return sorted(whole.items())


def skeleton() -> Tree:
    """Return the directories and links of an image without programs."""
    return {
        "bin": Link("usr/bin"),
        "sbin": Link("usr/sbin"),
        "lib": Link("usr/lib"),
        "lib64": Link("usr/lib64"),
        "usr/bin": Directory(),
        "usr/sbin": Directory(),
        "usr/lib": Directory(),
        "usr/lib64": Directory(),
        "etc/passwd": File(b"root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/:/bin/sh\n"),
        "etc/group": File(b"root:x:0:\nvideo:x:44:\nuser:x:1000:\n"),
        "dev": Directory(),
        "proc": Directory(),
        "sys": Directory(),
        "root": Directory(0o700),
        "run": Directory(),
        "tmp": Directory(0o1777),
    }


def find_program(name: str, *, package: str = "") -> str:
    """Return the path of a program that an image contains or is built with.

    Raises:
        SourceNotInstalled: it is missing; the message names the package.
    """
    found = shutil.which(name, path=_SEARCH_PATH)
    if found is None:
        raise SourceNotInstalled(
            f"to use the program {name} for an image",
            found=f"none in {_SEARCH_PATH}",
            do=f"install the package {package or name}",
        )
    return found


def read_file(path: str) -> File:
    """Return a file of this machine, for an image."""
    with open(path, "rb") as file:
        return File(file.read(), 0o755 if os.access(path, os.X_OK) else 0o644)


def _needed(program: str) -> Tree:
    """Return the libraries that a program of this machine needs, and its loader."""
    text = output_of([find_program("ldd", package="libc-bin"), program], may_fail=True)
    tree: Tree = {}
    for path in re.findall(r"(?:=> |^\s*)(/\S+) \(0x", text, flags=re.MULTILINE):
        tree.update(_library(path))
    return tree


def _library(path: str) -> Tree:
    """Return a library in its real directory, under the name it is loaded by."""
    directory = os.path.realpath(os.path.dirname(path)).lstrip("/")
    place = f"{directory}/{os.path.basename(path)}"
    target = os.path.realpath(path).lstrip("/")
    if not os.path.exists(path):
        raise SourceNotInstalled(f"to use the library {path} for an image", found="no such file")
    tree: Tree = {target: read_file(path)}
    if target != place:
        tree[place] = Link("/" + target)
    return tree


def _multiarch_directory() -> str:
    """Return the directory of this machine's libc, without the leading slash."""
    for path in _needed(find_program("cat")):
        if os.path.basename(path) == "libc.so.6":
            return os.path.dirname(path)
    raise SourceNotInstalled(
        "to use glibc for an image", found="this machine's programs do not use it"
    )


def _loader_cache(tree: Mapping[str, Node]) -> File:
    """Return the ld.so.cache that the machine's ldconfig writes for a tree."""
    with tempfile.TemporaryDirectory(prefix="nvshim-image-") as root:
        unpack(tree, root)
        # -X: the soname links are in the tree already; do not change it.
        output_of([find_program("ldconfig", package="libc-bin"), "-X", "-r", root])
        return read_file(os.path.join(root, "etc/ld.so.cache"))


def output_of(argv: list[str], *, may_fail: bool = False) -> str:
    """Return what a program writes to stdout.

    Raises:
        ImageBuildFailed: it failed, and ``may_fail`` is off.
    """
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, env={"PATH": _SEARCH_PATH, "LC_ALL": "C"}
    )
    if done.returncode != 0 and not may_fail:
        raise ImageBuildFailed(
            " ".join(argv), found=f"exit code {done.returncode}: {done.stderr or done.stdout}"
        )
    return done.stdout


def _architecture() -> str:
    machine = platform.machine()
    return _ARCHITECTURES.get(machine, machine)


def _media_type(kind: str) -> str:
    return f"application/vnd.oci.image.{kind}.v1+json"


def _digest(blob: bytes) -> str:
    return "sha256:" + hashlib.sha256(blob).hexdigest()


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
