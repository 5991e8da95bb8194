"""``python -m integration.gpu.bundle DIRECTORY``: everything that a machine with a GPU needs.

The directory is replaced as a whole, and an archive of it is put beside it. Programs are those of
this machine, or of another release of Debian; what takes time, their compression, is kept in
the cache for as long as they are the same.

Source: pyproject.toml for what the shim imports.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from typing import TYPE_CHECKING, Any, Final

from api.errors import NvshimError
from integration.gpu import programs
from integration.gpu.errors import BundleNotBuilt, BundleTooLarge
from integration.gpu.image import PROGRAM, gpu_image
from integration.gpu.run import IMAGE, MANIFEST, PROGRAMS, SHIM
from integration.images import File, glibc_libraries, write_archive
from integration.parts import INSTALLED, Parts
from shim.launcher import compile_native

if TYPE_CHECKING:
    from collections.abc import Callable

REPOSITORY: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LARGEST: Final = 60_000_000
"""Bytes of the directory and the archive beside it."""

_PACKAGES: Final = ("api", "hooks", "shim", "integration")
_NOT_TAKEN: Final = ("__pycache__", "bin", "example.py", ".ready", "*.pyi")
_ENTRY: Final = "run-on-gpu"
# Programs compress better if calls are written as absolute addresses (xz(1), --x86).
_FILTERS: Final = (
    {"id": lzma.FILTER_X86},
    # The programs have much in common, further apart than the usual dictionary reaches.
    {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 << 20},
)


def build(
    directory: str,
    *,
    site: str,
    parts: Parts | None = None,
    cache: str | None = None,
    revision: str = "",
    say: Callable[[str], None] = print,
) -> str:
    """Make the bundle.

    Args:
        directory: where; what is there is replaced.
        site: the packages that the shim imports, installed there.
        parts: containerd and runc; the installed ones if None.
        cache: where the compressed payload is kept; None to compress nothing and to leave out
            the archive, which is fast.
        revision: the commit that it is made from.
        say: told each step in one line.

    Returns:
        ``directory``.

    Raises:
        NvshimError: something that it is made of is missing, or it is too large. What was at
            ``directory`` is as it was.
    """
    directory = os.path.abspath(directory)
    parts = parts or Parts.installed()
    os.makedirs(os.path.dirname(directory), exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".bundle-", dir=os.path.dirname(directory)) as work:
        new = os.path.join(work, os.path.basename(directory))
        _copy_modules(os.path.join(new, "lib"), site)
        _write_entry(os.path.join(new, _ENTRY))
        plain = os.path.join(work, "payload.tar")
        versions = _make_payload(plain, work, parts)
        payload = _compressed(plain, new, cache, say)
        _write_manifest(new, payload, {"revision": revision, **versions})
        if cache is not None:
            _pack(new, f"{work}/archive", os.path.basename(directory))
            size = _size(new) + os.path.getsize(f"{work}/archive")
            if size > LARGEST:
                raise BundleTooLarge(
                    f"a bundle of at most {LARGEST} bytes with its archive", found=f"{size} bytes"
                )
            os.rename(f"{work}/archive", f"{directory}.tar.gz")
            say(f"{directory} and {directory}.tar.gz: {size / 1e6:.1f} MB")
        shutil.rmtree(directory, ignore_errors=True)
        os.rename(new, directory)
    return directory


def _copy_modules(library: str, site: str) -> None:
    if not os.path.isdir(site):
        raise BundleNotBuilt("the packages of the shim", found=f"no {site}", do="run make setup")
    ignore = shutil.ignore_patterns(*_NOT_TAKEN)
    shutil.copytree(site, library, ignore=ignore)
    for package in _PACKAGES:
        shutil.copytree(
            os.path.join(REPOSITORY, package), os.path.join(library, package),
            ignore=shutil.ignore_patterns("__pycache__", "*.pyi"),
        )  # fmt: skip


def _write_entry(path: str) -> None:
    source = os.path.join(os.path.dirname(__file__), "entry.py")
    with open(source, encoding="utf-8") as file, open(path, "w", encoding="utf-8") as entry:
        entry.write("#!/usr/bin/env python3\n")
        shutil.copyfileobj(file, entry)
    os.chmod(path, 0o755)  # noqa: S103 - a program


def _make_payload(path: str, work: str, parts: Parts) -> dict[str, str]:
    """Write the archive of programs and image; returns the versions of what is in it."""
    payload = os.path.join(work, "payload")
    directory = os.path.join(payload, PROGRAMS)
    image = gpu_image()
    prober = os.path.join(work, os.path.basename(PROGRAM))
    node = image.tree[PROGRAM]
    if not isinstance(node, File):
        raise BundleNotBuilt("the test program", found="it is no file of the image")
    with open(prober, "wb") as file:
        file.write(node.content)
    os.chmod(prober, 0o755)  # noqa: S103 - a program
    taken = (parts.containerd, parts.ctr, parts.shim, parts.runc)
    programs.collect([*taken, prober], directory, libraries=glibc_libraries())
    compile_native(os.path.join(directory, SHIM), compiler="gcc")
    write_archive(os.path.join(payload, IMAGE), [image])
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        archive.add(payload, arcname=".", filter=_anonymous)
    return {
        os.path.basename(program): _version(program) for program in (parts.containerd, parts.runc)
    }


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """A member without owner and time, so that the same files give the same archive."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = 0
    return member


def _version(program: str) -> str:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0]


def _compressed(plain: str, new: str, cache: str | None, say: Callable[[str], None]) -> str:
    """Put the payload into the bundle; returns its path."""
    if cache is None:
        return shutil.move(plain, os.path.join(new, "payload.tar"))
    with open(plain, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    kept = os.path.join(cache, f"payload-{digest[:16]}.tar.xz")
    if not os.path.exists(kept):
        say(f"compressing {os.path.getsize(plain) / 1e6:.0f} MB; it takes minutes")
        os.makedirs(cache, exist_ok=True)
        for old in os.listdir(cache):
            if old.startswith("payload-"):
                os.unlink(os.path.join(cache, old))
        with (
            open(plain, "rb") as source,
            lzma.open(f"{kept}.new", "wb", filters=_FILTERS) as target,
        ):
            shutil.copyfileobj(source, target, 1 << 20)
        os.rename(f"{kept}.new", kept)
    payload = os.path.join(new, "payload.tar.xz")
    shutil.copy(kept, payload)
    return payload


def _write_manifest(new: str, payload: str, values: dict[str, Any]) -> None:
    with open(payload, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    manifest = {**values, "payload": os.path.basename(payload), "sha256": digest}
    with open(os.path.join(new, MANIFEST), "w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)


def _pack(directory: str, path: str, name: str) -> None:
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT, compresslevel=6) as archive:
        archive.add(directory, arcname=name, filter=_anonymous)


def _size(directory: str) -> int:
    return sum(
        os.path.getsize(os.path.join(above, name))
        for above, _, names in os.walk(directory)
        for name in names
    )


def _main() -> int:
    parser = argparse.ArgumentParser(prog="python -m integration.gpu.bundle", description=__doc__)
    parser.add_argument("directory")
    parser.add_argument("--site", default=os.path.join(REPOSITORY, ".cache", "site"))
    parser.add_argument("--cache", default=os.path.join(REPOSITORY, ".cache", "gpu-bundle"))
    parser.add_argument("--parts", default=INSTALLED, help="installed, or a release (trixie)")
    parser.add_argument("--revision", default="")
    asked = parser.parse_args()
    try:
        build(
            asked.directory,
            site=asked.site,
            cache=asked.cache,
            parts=Parts.named(asked.parts, say=print),
            revision=asked.revision,
        )
    except NvshimError as error:
        print(f"gpu-bundle: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
