"""Put the code that shims execute together in memory, so that they copy fewer pages.

Python writes to the code that it executes: it counts down to the specialization of an instruction,
and from 3.13 on each conditional jump notes whether it jumped. After a fork, each such write copies
a page of 4096 bytes. The code that one shim with GPUs executes was on 360 pages.

So the fork server gives the functions of a list copies of their code, and makes the copies one
after the other: 150 pages, and half a megabyte less for each shim. A copy has the same
instructions, constants, names and lines.

The list, executed_code.txt, is recorded by :mod:`tests.bench.executed_code`. A function that is
missing in it costs a page at most; a name without a function costs nothing.

Source: CPython 3.13 Python/bytecodes.c (POP_JUMP_IF_FALSE, RESUME), Objects/codeobject.c.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from types import CodeType, FunctionType
from typing import Final

from shim.forkserver.memory import fill_holes, side_by_side

LIST: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "executed_code.txt")
"""A line for each function: its module and its qualified name, in the order of their places."""


def read_list(path: str = LIST) -> list[tuple[str, str]]:
    """Return the modules and qualified names of the listed functions; none without the file."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.split() for line in file if not line.startswith("#")]
    except OSError:
        return []
    return [(module, name) for module, name in lines]


def put_together(listed: Iterable[tuple[str, str]]) -> None:
    """Give functions copies of their code, made one after the other.

    Args:
        listed: the modules and qualified names of the functions.
    """
    places = {name: place for place, name in enumerate(listed)}
    found: list[tuple[int, FunctionType]] = []
    for each in gc.get_objects():
        if isinstance(each, FunctionType):
            name = _module(each), each.__code__.co_qualname
            if name in places:
                found.append((places[name], each))
    found.sort(key=lambda item: item[0])
    # Kept until the end: a copy would go into the place of a freed original.
    originals = [function.__code__ for _, function in found]
    for each in originals:
        _cache(each)
    fill_holes()
    copies: dict[int, CodeType] = {}
    with side_by_side():
        for original, (_, function) in zip(originals, found, strict=True):
            function.__code__ = _copied(original, _module(function), places, copies)


def _module(function: FunctionType) -> str:
    # A wrapper has the module of the wrapped function in __module__.
    return str(function.__globals__.get("__name__"))


def _cache(code: CodeType) -> None:
    """Let the original cache what a copy is made from, so that this is not between the copies."""
    code.co_code, code.co_varnames, code.co_cellvars, code.co_freevars  # noqa: B018
    for each in code.co_consts:
        if isinstance(each, CodeType):
            _cache(each)


def _copied(
    code: CodeType,
    module: str,
    listed: dict[tuple[str, str], int],
    copies: dict[int, CodeType],
) -> CodeType:
    """Return a copy of the code, with copies of the listed functions that it defines.

    Args:
        module: where it is executed.
        listed: the modules and names of the functions whose code is copied.
        copies: what was copied, by the identity of the original.
    """
    if id(code) not in copies:
        constants = tuple(
            _copied(each, module, listed, copies)
            if isinstance(each, CodeType) and (module, each.co_qualname) in listed
            else each
            for each in code.co_consts
        )
        copies[id(code)] = code.replace(co_consts=constants)
    return copies[id(code)]
