"""``python -m tools.gpu.bundle DIRECTORY``: everything that a machine with a GPU needs.

A bundle is a self-contained tree with more files: ``bin/run-on-gpu``, this package, the programs of
containerd with their libraries, and an image. ``tree.json`` has a digest of all of them.

The machine may have another libc, or one that containerd and runc cannot use. So they bring their
dynamic loader and libraries, and contain their paths (ELF interpreter, DT_RPATH). An environment
variable would not work: runc executes itself again, and child processes must not load these
libraries. A run mounts the bundle at that path, wherever it is.

Source: elf(5) PT_INTERP and DT_RPATH; ld.so(8); patchelf(1).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from api.errors import NvshimError
from integration.tree import MANIFEST, Tree
from tools import REPOSITORY
from tools.dist.archive import write_tarball
from tools.dist.build import build as build_tree
from tools.dist.inputs import Inputs
from tools.dist.manifest import write_tree
from tools.errors import BundleNotBuilt
from tools.gpu.image import PROGRAM, gpu_image
from tools.gpu.machine import BUNDLE
from tools.images import File, glibc_libraries, write_archive
from tools.parts import INSTALLED, Parts, patchelf, set_loader

_ENTRY: Final = """\
import sys

del sys.argv[0]
_tree = __file__.rpartition("/bin/")[0]
sys.path += [_tree + "/lib", _tree + "/lib-node"]
from tools.gpu.run import main

sys.exit(main(_tree, sys.argv[1:]))
"""
# The tools that run on the machine.
_TOOLS: Final = ("__init__.py", "containerd.py", "errors.py", "gpu")
_LDD_LINE: Final = re.compile(r"(?:=> |^\s*)(/\S+) \(0x", re.MULTILINE)


def build(directory: str, tree: Tree, parts: Parts | None = None) -> Tree:
    """Build the bundle.

    Args:
        directory: where; an existing bundle is replaced if the new one can be built.
        tree: the self-contained tree that it is made from.
        parts: containerd and runc; the installed ones if None.

    Raises:
        NvshimError: an input is missing.
    """
    parts = parts or Parts.installed()
    directory = os.path.abspath(directory)
    os.makedirs(os.path.dirname(directory), exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".bundle-", dir=os.path.dirname(directory)) as work:
        new = os.path.join(work, "new")
        shutil.copytree(tree.path, new, symlinks=True)
        os.unlink(os.path.join(new, MANIFEST))
        for name in _TOOLS:
            source = os.path.join(REPOSITORY, "tools", name)
            target = os.path.join(new, "lib", "tools", name)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if os.path.isdir(source):
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        # This program executes the Python program of the same name next to it.
        shutil.copy(os.path.join(new, "bin", "nvshim"), os.path.join(new, "bin", "run-on-gpu"))
        with open(os.path.join(new, "bin", "run-on-gpu.py"), "w", encoding="utf-8") as file:
            file.write(_ENTRY)
        image = gpu_image()
        write_archive(os.path.join(new, "image.tar"), [image])
        prober = os.path.join(work, os.path.basename(PROGRAM))
        node = image.tree[PROGRAM]
        if isinstance(node, File):
            with open(prober, "wb") as program:
                program.write(node.content)
            os.chmod(prober, node.mode)
        taken = (parts.containerd, parts.ctr, parts.shim, parts.runc, prober)
        collect(taken, os.path.join(new, "programs"), libraries=glibc_libraries())
        made = write_tree(
            new, version=tree.version, revision=tree.revision, architecture=tree.architecture,
            python=tree.python,
        )  # fmt: skip
        shutil.rmtree(directory, ignore_errors=True)
        os.rename(new, directory)
    return replace(made, path=directory)


def collect(
    programs: Iterable[str],
    directory: str,
    *,
    libraries: Iterable[str] = (),
    place: str = f"{BUNDLE}/programs",
) -> None:
    """Copy programs with the libraries that they need.

    Args:
        directory: where to; it is created. Programs keep their names; libraries are in its ``lib``.
        libraries: more libraries of the same libc, which programs load by themselves.
        place: the path of the directory at run time.

    Raises:
        BundleNotBuilt: a program is static, or a library is missing.
        ProgramNotAdapted: patchelf is missing, or failed.
    """
    beside = os.path.join(directory, "lib")
    os.makedirs(beside)
    for library in libraries:
        shutil.copy(library, beside)
    for program in programs:
        copy = os.path.join(directory, os.path.basename(program))
        asked = f"to run {os.path.basename(program)} with its own libraries"
        shutil.copy(program, copy)
        done = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
        for library in _LDD_LINE.findall(done.stdout):
            shutil.copy(library, beside)
        loader = os.path.basename(patchelf(asked, "--print-interpreter", program).strip())
        if not os.path.exists(os.path.join(beside, loader)):
            raise BundleNotBuilt(asked, found=f"no {loader} among what ldd lists")
        set_loader(asked, copy, f"{place}/lib/{loader}", [f"{place}/lib"])


def main(say: Callable[[str], None] = print) -> int:
    """Build the bundle and an archive of it; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.bundle", description=__doc__)
    parser.add_argument("directory")
    parser.add_argument("--parts", default=INSTALLED, help="installed, or a release (trixie)")
    asked = parser.parse_args()
    directory = os.path.abspath(asked.directory)
    try:
        tree = build_tree(
            os.path.join(os.path.dirname(directory), "tree"), Inputs.of(),
            cache=os.path.join(REPOSITORY, ".cache", "dist"), say=say,
        )  # fmt: skip
        bundle = build(directory, tree, Parts.named(asked.parts, say=say))
        write_tarball(bundle, f"{directory}.tar.gz", top=os.path.basename(directory))
    except NvshimError as error:
        print(f"gpu-bundle: {error}", file=sys.stderr)
        return 1
    size = os.path.getsize(f"{directory}.tar.gz") / 1e6
    say(f"{directory} and {directory}.tar.gz: {size:.0f} MB packed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
