"""Nothing but the rootfs object touches an image's files: read off the source.

Two rules, over every module of ``hooks`` and ``shim``:

1. **Nothing is put behind the path of a rootfs.** A name that has "rootfs" in it may be passed
   around, mounted and opened as a whole; but ``os.path.join(rootfs, …)``, ``rootfs + "/…"``,
   ``f"{rootfs}/…"``, ``rootfs / …`` and formatting make a path *below* it, which the kernel
   would then resolve along whatever links the image holds. There is no exception.
2. **Who holds a rootfs object has no need of paths.** A module that imports ``hooks.image.rootfs``
   calls nothing that takes a path of the file system (``open``, ``os.open``, ``os.stat``,
   ``os.symlink``, ``shutil``, ``pathlib`` …). The three modules that are the rootfs object are
   exempt, and so are the calls listed here, each with the path of the host that it is for.

The rules are about names, so they can be evaded; they are there for the slip, not for malice.
"""

from __future__ import annotations

import ast
import os
from typing import Final

import pytest

REPOSITORY: Final = os.path.dirname(os.path.abspath(__file__)).rsplit("/tests/", 1)[0]

THE_ROOTFS_OBJECT: Final = {
    "hooks/image/rootfs.py",
    "hooks/image/directory.py",
    "hooks/image/openat2.py",
}

HOST_PATHS: Final = {
    ("hooks/image/staging.py", "os.makedirs"): "the staging directory in the bundle",
    ("hooks/image/staging.py", "os.path.isdir"): "the source of a mount, in the driver root",
    ("hooks/image/staging.py", "os.path.lexists"): "below the source of a mount",
    ("shim/work/layered.py", "os.stat"): "where this code is installed",
}

# fmt: off
TAKES_A_PATH: Final = frozenset({
    "open", "os.access", "os.chdir", "os.chmod", "os.chown", "os.chroot", "os.getxattr",
    "os.lchown", "os.link", "os.listdir", "os.listxattr", "os.lstat", "os.makedirs", "os.mkdir",
    "os.mkfifo", "os.mknod", "os.open", "os.readlink", "os.remove", "os.removedirs",
    "os.removexattr", "os.rename", "os.renames", "os.replace", "os.rmdir", "os.scandir",
    "os.setxattr", "os.stat", "os.statvfs", "os.symlink", "os.truncate", "os.unlink", "os.utime",
    "os.walk", "os.fwalk", "os.path.exists", "os.path.lexists", "os.path.isfile", "os.path.isdir",
    "os.path.islink", "os.path.ismount", "os.path.getsize", "os.path.getmtime",
    "os.path.realpath", "os.path.samefile",
})
# fmt: on
PATH_MODULES: Final = {"shutil", "pathlib", "glob", "tempfile", "io", "fileinput"}


def sources() -> list[str]:
    found = []
    for package in ("hooks", "shim"):
        for directory, _, files in os.walk(f"{REPOSITORY}/{package}"):
            found += [f"{directory}/{name}" for name in files if name.endswith(".py")]
    return sorted(path[len(REPOSITORY) + 1 :] for path in found)


def dotted(node: ast.AST) -> str:
    """``os.path.join`` of such an expression; "" of any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def is_rootfs(node: ast.AST) -> bool:
    """Whether an expression is named for a rootfs: ``rootfs``, ``self._rootfs``, ``x.rootfs``."""
    if isinstance(node, ast.FormattedValue):
        return is_rootfs(node.value)
    if isinstance(node, ast.Call):
        return any(is_rootfs(argument) for argument in node.args)
    return "rootfs" in dotted(node).rpartition(".")[2].lower()


def continues_a_path(node: ast.AST) -> bool:
    """Whether what comes behind a path makes it longer, and is not the rest of a sentence."""
    if isinstance(node, ast.Constant):
        return str(node.value).startswith("/")
    return True


def paths_below_a_rootfs(tree: ast.AST) -> list[int]:
    """Lines where something is put behind the path of a rootfs."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            is_join = dotted(node.func).endswith((".join", ".joinpath", ".format"))
            parts: list[ast.AST] = [*node.args]
            found = is_join and any(map(is_rootfs, parts[:-1] if len(parts) > 1 else []))
            found |= dotted(node.func).endswith(".joinpath") and is_rootfs(node.func.value)  # type: ignore[attr-defined]  # a dotted call is an attribute
        elif isinstance(node, ast.JoinedStr):
            pairs = zip(node.values, node.values[1:], strict=False)
            found = any(is_rootfs(a) and continues_a_path(b) for a, b in pairs)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            found = is_rootfs(node.left)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            found = is_rootfs(node.left) and continues_a_path(node.right)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            operands = node.right.elts if isinstance(node.right, ast.Tuple) else [node.right]
            found = isinstance(node.left, ast.Constant) and any(map(is_rootfs, operands))
        else:
            continue
        if found:
            lines.append(node.lineno)
    return lines


def imports(tree: ast.AST) -> set[str]:
    """The modules that are imported, also where only types are checked."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{name.name}" for name in node.names}
    return found


def calls_that_take_a_path(tree: ast.AST) -> list[tuple[int, str]]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [(node.lineno, dotted(node.func)) for node in calls]
    return [
        (line, name)
        for line, name in named
        if name in TAKES_A_PATH or name.partition(".")[0] in PATH_MODULES
    ]


def parsed(path: str) -> ast.AST:
    with open(f"{REPOSITORY}/{path}", encoding="utf-8") as file:
        return ast.parse(file.read(), path)


def test_nothing_is_put_behind_the_path_of_a_rootfs() -> None:
    found = [f"{path}:{line}" for path in sources() for line in paths_below_a_rootfs(parsed(path))]
    assert found == []


def test_who_holds_a_rootfs_object_has_no_need_of_paths() -> None:
    found = []
    for path in sources():
        tree = parsed(path)
        if path in THE_ROOTFS_OBJECT or not any(
            name.startswith(("hooks.image.rootfs.", "hooks.image.directory"))
            for name in imports(tree)
        ):
            continue
        found += [
            f"{path}:{line}: {name}"
            for line, name in calls_that_take_a_path(tree)
            if (path, name) not in HOST_PATHS
        ]
    assert found == []


def test_the_rootfs_object_gives_no_path_away() -> None:
    """What has no path cannot have anything put behind it."""
    from hooks.image.rootfs import Rootfs  # noqa: PLC0415  # the other tests read source only

    assert Rootfs.__slots__ == ("_fd",)


def test_every_exception_is_still_needed() -> None:
    unneeded = [
        (path, name)
        for path, name in HOST_PATHS
        if name not in {called for _, called in calls_that_take_a_path(parsed(path))}
    ]
    assert unneeded == []


@pytest.mark.parametrize(
    "source",
    [
        'open(os.path.join(rootfs, "etc/passwd"))',
        'os.path.join(self._rootfs, "etc")',
        'f"{rootfs}/etc"',
        'f"{bundle.rootfs}{path}"',
        'rootfs + "/etc"',
        "rootfs + path",
        'rootfs_path / "etc"',
        '"%s/etc" % rootfs',
        '"%s/%s" % (rootfs, "etc")',
        '"{}/etc".format(rootfs, "etc")',
        'Path(rootfs).joinpath("etc")',
        'Path(rootfs) / "etc"',
    ],
)
def test_a_path_below_a_rootfs_is_noticed(source: str) -> None:
    assert paths_below_a_rootfs(ast.parse(source)) == [1]


@pytest.mark.parametrize(
    "source",
    [
        'os.path.join(bundle, "rootfs")',
        "os.path.join(bundle, ROOTFS)",
        'f"to mount at {rootfs}"',
        'f"{rootfs}: no directory"',
        "mount(source, rootfs)",
        'rootfs.read_file("/etc/passwd")',
    ],
)
def test_a_rootfs_as_a_whole_is_nobody_s_business(source: str) -> None:
    assert paths_below_a_rootfs(ast.parse(source)) == []
