"""Build a self-contained tree from its inputs."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from typing import Final

from integration.errors import TreeError
from integration.tree import PROBE, Tree, read_tree, verify
from tools.dist import interpreter, modules, share
from tools.dist.inputs import Inputs
from tools.dist.interpreter import Packages
from tools.dist.manifest import write_tree
from tools.errors import TreeNotBuilt
from tools.launcher import SOURCES, compile_native, tree_text
from tools.stamps import read_stamp, write_stamp

__all__ = ["build"]

PROGRAM: Final = "containerd-shim-nvidia-v1"

_NVSHIM: Final = """\
# Made by tools.dist; see there. The first argument is what nvshim was called.
import sys

_tree = __file__.rpartition("/bin/")[0]
sys.path += [_tree + "/lib", _tree + "/lib-node"]
del sys.argv[0]
from integration.cli.__main__ import main

sys.exit(main())
"""

# The tree's own interpreter runs this. The constants that a module's bytecode shares depend on
# earlier compilations in the same process, so compile one by one, in order.
_COMPILE: Final = """\
import os, py_compile, sys
unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
for top in sys.argv[1:]:
    for above, directories, names in os.walk(top):
        directories.sort()
        for name in sorted(names):
            if name.endswith(".py"):
                path = os.path.join(above, name)
                py_compile.compile(path, dfile=path, doraise=True, invalidation_mode=unchecked)
"""
# Each in a separate process, because this is most of the work.
_COMPILED: Final = (("lib",), ("lib-node",), ("runtime/lib",))


def build(
    directory: str, inputs: Inputs, *, cache: str, say: Callable[[str], None] = print
) -> Tree:
    """Build a tree of these inputs in a directory, unless it is there.

    Args:
        directory: where; another tree there is replaced.
        say: called with one line for each step.

    Raises:
        NvshimError: an input is missing. The directory is unchanged.
    """
    directory = os.path.abspath(directory)
    packages = Packages.have(say=say)
    fingerprint = inputs.fingerprint(packages.roots)
    stamp = f"{directory}.of"
    if read_stamp(stamp) == fingerprint and (tree := _intact(directory)) is not None:
        return tree
    parent = os.path.dirname(directory)
    os.makedirs(parent, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tree-", dir=parent) as work:
        new = os.path.join(work, "tree")
        _make(new, inputs, packages, cache)
        shutil.rmtree(directory, ignore_errors=True)
        os.rename(new, directory)
    write_stamp(stamp, fingerprint)
    tree = read_tree(directory)
    size = sum(os.lstat(os.path.join(directory, name)).st_size for name in tree.files)
    say(f"{directory}: {tree.name}, {len(tree.files)} files, {size / 1e6:.1f} MB")
    return tree


def _make(tree: str, inputs: Inputs, packages: Packages, cache: str) -> None:
    os.makedirs(os.path.join(tree, "bin"))
    used = interpreter.place(os.path.join(tree, "runtime"), packages)
    library, node_library = os.path.join(tree, "lib"), os.path.join(tree, "lib-node")
    modules.copy_ours(inputs.source, library)
    site = modules.install(inputs.source, packages, cache)
    projects = modules.copy_theirs(inputs.source, site, library, node_library)
    _make_programs(tree, inputs)
    used |= interpreter.place_libraries(tree, packages)
    _strip(tree)
    _set_modes(tree, inputs.epoch)
    _compile(tree)
    share.fill(tree, inputs, packages, used, projects)
    _set_modes(tree, inputs.epoch)
    write_tree(
        tree,
        version=inputs.version,
        revision=inputs.revision,
        architecture=inputs.architecture,
        python=_run(tree, "-ISc", "import platform; print(platform.python_version())").strip(),
    )
    _set_modes(tree, inputs.epoch)


def _make_programs(tree: str, inputs: Inputs) -> None:
    source = inputs.source
    own = [os.path.join(source, "tools", "dist", "entry.c")]
    own += [os.path.join(source, "shim", "forkserver", name) for name in ("tree.c",)]
    launcher = [os.path.join(source, "shim", "forkserver", name) for name in SOURCES]
    programs: tuple[tuple[str, Sequence[str], str], ...] = (
        (f"bin/{PROGRAM}", launcher, "TREE"),
        ("bin/nvshim", own, "NVSHIM"),
        ("runtime/bin/python3", own, "PYTHON3"),
        (f"runtime/bin/{PROBE}", [os.path.join(source, "integration", "verify", "probe.c")], ""),
    )
    for path, sources, define in programs:
        compile_native(os.path.join(tree, path), compiler="gcc", sources=sources, define=define)
    for name, text in ((PROGRAM, tree_text(inputs.revision)), ("nvshim", _NVSHIM)):
        with open(os.path.join(tree, "bin", f"{name}.py"), "w", encoding="utf-8") as file:
            file.write(text)


def _strip(tree: str) -> None:
    """Strip debugger symbols from PyPI's libraries; Debian's have none."""
    files = [
        path
        for library in ("lib", "lib-node")
        for path in interpreter.elf_files(os.path.join(tree, library))
    ]
    _tool(["strip", "--strip-unneeded", "--enable-deterministic-archives", *files])


def _compile(tree: str) -> None:
    running = [
        subprocess.Popen(
            [os.path.join(tree, "runtime", "bin", "python3"), "-Sc", _COMPILE, *tops],
            cwd=tree, env={"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for tops in _COMPILED
    ]  # fmt: skip
    said = [process.communicate()[1] for process in running]
    for process, words in zip(running, said, strict=True):
        if process.returncode:
            raise TreeNotBuilt("bytecode for the tree", found=words.strip()[-300:])


def _set_modes(tree: str, epoch: int) -> None:
    """Set files' times to the commit's, and modes only by whether they are executable."""
    for above, directories, names in os.walk(tree):
        for name in names:
            path = os.path.join(above, name)
            if not os.path.islink(path):
                os.chmod(path, 0o755 if _is_program(os.path.relpath(path, tree)) else 0o644)
            os.utime(path, (epoch, epoch), follow_symlinks=False)
        for name in directories:
            os.chmod(os.path.join(above, name), 0o755)
            os.utime(os.path.join(above, name), (epoch, epoch))
    os.chmod(tree, 0o755)
    os.utime(tree, (epoch, epoch))


def _is_program(path: str) -> bool:
    directory, name = os.path.split(path)
    return (directory in {"bin", "runtime/bin"} and not name.endswith(".py")) or (
        directory == "runtime/lib" and name.startswith("ld-linux")
    )


def _run(tree: str, *words: str) -> str:
    return _tool([os.path.join(tree, "runtime", "bin", "python3"), *words])


def _tool(argv: Sequence[str]) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    except OSError as error:
        raise TreeNotBuilt(
            "a self-contained tree", found=f"{argv[0]}: {os.strerror(error.errno or 0).lower()}"
        ) from error
    if done.returncode:
        raise TreeNotBuilt(
            "a self-contained tree", found=f"{argv[0]} failed: {done.stderr.strip()[-300:]}"
        )
    return done.stdout


def _intact(directory: str) -> Tree | None:
    try:
        return verify(directory)
    except TreeError:
        return None
