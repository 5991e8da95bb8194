"""Our modules as syntax trees: the variables they read, and the advice in their errors."""

from __future__ import annotations

import ast
import functools
import gc
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from tools import REPOSITORY

__all__ = [
    "INSTALLED",
    "ROOMS",
    "Module",
    "assigned",
    "calls",
    "causes",
    "modules",
    "remedies",
    "texts",
    "variables_of_c",
    "variables_read",
]

INSTALLED: Final = ("api", "hooks", "shim", "integration")
"""The installed directories."""
ROOMS: Final = (*INSTALLED, "tools")


class Module(NamedTuple):
    """One of our modules."""

    path: str  # relative to the repository
    tree: ast.Module  # its syntax tree


@functools.cache
def modules(rooms: tuple[str, ...] = ROOMS) -> tuple[Module, ...]:
    """Return every module, in order, without those that protoc has generated.

    Args:
        rooms: the directories to search.
    """
    paths = [path for path in _files(rooms, ".py") if not path.endswith("_pb2.py")]
    # Trees are large and contain no garbage, and collecting it would take most of the time.
    gc.disable()
    try:
        return tuple(map(_module, paths))
    finally:
        gc.freeze()
        gc.enable()


@functools.cache
def _nodes(module: Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(module.tree))


@functools.cache
def calls(module: Module) -> tuple[tuple[str, ast.Call], ...]:
    """Return every call in a module, with the last name of the callee; "" if it has none.

    Args:
        module: any.
    """
    return tuple(
        (getattr(node.func, "attr", getattr(node.func, "id", "")), node)
        for node in _nodes(module)
        if isinstance(node, ast.Call)
    )


@functools.cache
def _module(path: str) -> Module:
    with open(os.path.join(REPOSITORY, path), encoding="utf-8") as file:
        return Module(path, ast.parse(file.read(), path))


def _files(rooms: tuple[str, ...], *endings: str) -> Iterator[str]:
    found = []
    for room in rooms:
        for directory, _, names in os.walk(os.path.join(REPOSITORY, room)):
            found += [os.path.join(directory, name) for name in names if name.endswith(endings)]
    yield from sorted(os.path.relpath(path, REPOSITORY) for path in found)


@functools.cache
def texts(module: Module) -> tuple[tuple[int, str], ...]:
    """Return every string constant of a module except docstrings, with its line.

    Args:
        module: any.
    """
    prose = {
        id(node.value)
        for node in _nodes(module)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    found = []
    for node in _nodes(module):
        if isinstance(node, ast.Constant) and id(node) not in prose:
            if isinstance(node.value, str):
                found.append((node.lineno, node.value))
            elif isinstance(node.value, bytes):
                found.append((node.lineno, node.value.decode("latin-1")))
    return tuple(found)


# -- variables ------------------------------------------------------------------------------


def variables_read(module: Module) -> Iterator[tuple[int, str]]:
    """Yield the environment variables that a module reads, with the lines; "?" for other keys.

    Args:
        module: any.
    """
    names = _constants_of(module.tree)
    for node in _nodes(module):
        asked: list[ast.expr] = []
        if isinstance(node, ast.Subscript) and _is_environ(node.value):
            asked = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            getters = {"get", "pop", "setdefault"}
            if (node.func.attr in getters and _is_environ(node.func.value)) or (
                node.func.attr == "getenv"
            ):
                asked = [node.args[0]]
        elif isinstance(node, ast.keyword) and node.arg == "envvar":
            asked = node.value.elts if isinstance(node.value, ast.List) else [node.value]
        for each in asked:
            yield each.lineno, _name(each, names)


def _is_environ(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in {"environ", "environb"} and getattr(node.value, "id", "") == "os"
    return isinstance(node, ast.Name) and node.id == "environ"


def _name(node: ast.expr, constants: Mapping[str, str]) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return constants.get(node.id, "?") if isinstance(node, ast.Name) else "?"


_GETENV: Final = re.compile(r'getenv\((?:"([A-Za-z_]\w*)"|([A-Za-z_]\w*))\)')
_DEFINE: Final = re.compile(
    r'(?:#define\s+(\w+)\s+|static\s+const\s+char\s+(\w+)\[\]\s*=\s*)"([A-Z_][A-Z0-9_]*)"'
)


def variables_of_c(rooms: tuple[str, ...] = ROOMS) -> Iterator[tuple[str, str]]:
    """Yield the environment variables that C programs read: (path, name), "?" for other keys.

    Args:
        rooms: the directories to search.
    """
    for path in _files(rooms, ".c", ".h"):
        with open(os.path.join(REPOSITORY, path), encoding="utf-8") as file:
            text = file.read()
        names = {one or two: value for one, two, value in _DEFINE.findall(text)}
        for literal, name in _GETENV.findall(text):
            yield path, literal or names.get(name, "?")


# -- errors ---------------------------------------------------------------------------------


def remedies(rooms: tuple[str, ...] = ROOMS) -> Mapping[str, tuple[str, ...]]:
    """Return the remedies in the code for each error, by the name of its class."""
    return _advice_in(modules(rooms), "do")


def causes(rooms: tuple[str, ...] = ROOMS) -> Mapping[str, tuple[str, ...]]:
    """Return the causes in the code for each error, by the name of its class."""
    return _advice_in(modules(rooms), "found")


def _advice_in(those: Iterable[Module], argument: str) -> Mapping[str, tuple[str, ...]]:
    """Return the texts of one argument of each error, by the name of its class.

    Inserted values are replaced by ``…``.

    Args:
        those: the modules.
        argument: ``found`` or ``do``.
    """
    said: dict[str, dict[str, None]] = {}
    for module in those:
        names = _constants_of(module.tree)
        for kind, call in calls(module):
            for keyword in call.keywords:
                if keyword.arg == argument:
                    for text in _sentences(keyword.value, names):
                        said.setdefault(kind, {})[text] = None
    return {kind: tuple(texts) for kind, texts in said.items()}


def _constants_of(tree: ast.Module) -> Mapping[str, str]:
    """Return a module's text constants by their names."""
    return {
        name: value.value
        for name, value in assigned(tree)
        if isinstance(value, ast.Constant) and isinstance(value.value, str)
    }


def assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the names that a module assigns at its top level, with the values."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Name):
                yield target.id, node.value


def _sentences(node: ast.expr, names: Mapping[str, str]) -> Iterator[str]:
    if isinstance(node, ast.IfExp):
        yield from _sentences(node.body, names)
        yield from _sentences(node.orelse, names)
        return
    text = " ".join(_text(node, names).split())
    if text.strip("… "):
        yield text


def _text(node: ast.expr, names: Mapping[str, str]) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, names) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, names)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, names) + _text(node.right, names)
    if isinstance(node, ast.Name):
        return names.get(node.id, "…")
    return "…"
