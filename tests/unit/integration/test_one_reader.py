"""Only integration/containers reads bundles and the directories of processes.

Any other reader would need the same care: a tenant's process can make it hang, and a tenant's links
can lead it anywhere. The test searches the code for paths of processes, for names of a bundle's
files, and for the methods of Procfs that read any file.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.harness.launcher import REPOSITORY

READER: Final = "containers"

# Modules that may do it, with the reason. None of these reads a tenant's process.
EXCEPTIONS: Final = {
    "apiserver/connection.py": "gives OpenSSL a certificate by a descriptor of its own",
    "driver_launch_child.py": "reads its own stat, in a program without imports",
    "files.py": "asks which mount a descriptor of its own is on",
    "install/selftest.py": "makes a bundle of its own, and reads none",
    "kubelet/sockets.py": "changes the mode of its own socket by its descriptor",
    "kubernetes/host.py": "reaches a directory by its own descriptor, with no link followed",
    "kubernetes/installer.py": "reaches a directory by its own descriptor, with no link followed",
    "node/private_file.py": "closes descriptors of its own thread",
}

_OF_A_PROCESS: Final = re.compile(r"/proc/(?:self|thread-self|\d+)(?:/|$)")
_FILES_OF_A_BUNDLE: Final = re.compile(
    r"(?:^|/)(?:config\.json|init\.pid|nvidia(?:-before)?\.json|bootstrap\.json|shim-binary-path)$"
)
_RAW: Final = frozenset({"text", "link", "node", "descriptors", "open_file", "mappings"})
_OPENS: Final = frozenset({"join", "Path", "open", "scandir", "listdir", "readlink", "stat"})


def _name(node: ast.expr) -> str:
    """Return the last name of an expression: procfs for ``self._procfs`` and ``Procfs(x)``."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return str(name).lower().lstrip("_")


def _is_root_of_procfs(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return node.value == "/proc"
    return _name(node) == "proc" or (
        isinstance(node, ast.Attribute) and _name(node.value) == "procfs"
    )


def _starts_at_a_process(parts: list[ast.expr]) -> bool:
    """Return whether an f-string is PROC/{pid}, or {bundle}/..., with PROC in any form."""
    first, *rest = parts
    after = rest[0].value if rest and isinstance(rest[0], ast.Constant) else ""
    if isinstance(first, ast.Constant):
        return str(first.value).endswith("/proc/") and bool(rest)
    if not isinstance(first, ast.FormattedValue) or not str(after).startswith("/"):
        return False
    if _name(first.value) == "bundle" and isinstance(first.value, ast.Attribute):
        return True
    return _is_root_of_procfs(first.value) and after == "/" and len(rest) > 1


def _readings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Return the lines at which a module reads a process or a bundle by itself."""
    documents = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in documents:
            if _OF_A_PROCESS.match(node.value) or _FILES_OF_A_BUNDLE.search(node.value):
                yield node.lineno, f"the path {node.value!r}"
        elif isinstance(node, ast.JoinedStr) and node.values and _starts_at_a_process(node.values):
            yield node.lineno, "a path below a process or a bundle"
        elif isinstance(node, ast.ImportFrom) and (
            node.module == "shim.bundle"
            or (node.module == "shim" and any(each.name == "bundle" for each in node.names))
        ):
            yield node.lineno, "the names of a bundle's files"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            yield from _of_call(node)


def _of_call(call: ast.Call) -> Iterator[tuple[int, str]]:
    function = call.func
    if isinstance(function, ast.Attribute) and function.attr in _RAW:
        if _name(function.value) == "procfs":
            yield call.lineno, f"Procfs.{function.attr}"
    elif _name(function) in {each.lower() for each in _OPENS} and call.args:
        first = call.args[0]
        is_bundle = isinstance(first, ast.Attribute) and first.attr == "bundle"
        if is_bundle or _is_root_of_procfs(first):
            yield call.lineno, "a path below a process or a bundle"


def test_no_other_room_reads_processes_or_bundles() -> None:
    found: dict[str, list[str]] = {}
    top = Path(REPOSITORY, "integration")
    for path in sorted(top.rglob("*.py")):
        name = str(path.relative_to(top))
        if not name.startswith(f"{READER}/"):
            for line, what in _readings(ast.parse(path.read_text(encoding="utf-8"))):
                found.setdefault(name, []).append(f"line {line}: {what}")
    assert {name: lines for name, lines in found.items() if name not in EXCEPTIONS} == {}
    assert sorted(EXCEPTIONS) == sorted(found), "an exception that is no longer needed"


@pytest.mark.parametrize(
    "code",
    [
        'open("/proc/self/fd/3")',
        'open(f"/proc/{pid}/exe")',
        'os.readlink(f"{procfs.path}/{pid}/exe")',
        'open(f"{config.proc}/{pid}/stat")',
        'os.path.join("/proc", str(pid))',
        "os.scandir(proc)",
        "from shim.bundle import INIT_PID",
        "from shim import bundle as bundle_files",
        'open(f"{container.bundle}/other")',
        'os.path.join(container.bundle, "log")',
        'NAME = "init.pid"',
        "self._procfs.text(pid, 'comm')",
        "Procfs().link(pid, 'exe')",
        "process.procfs.mappings(1)",
    ],
)
def test_a_reading_is_seen(code: str) -> None:
    assert list(_readings(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        '"""Reads /proc/self/fd and config.json."""',
        'read_text(f"{config.proc}/driver/nvidia/params")',
        'open("/proc/locks")',
        'Procfs(places.at("/proc")).words(pid)',
        "known[container.bundle] = container.text",
        'found["bundle"] = f"{bundle} of it"',
    ],
)
def test_what_reads_no_process_is_left_alone(code: str) -> None:
    assert not list(_readings(ast.parse(code)))
