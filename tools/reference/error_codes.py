"""The errors: a page of those that users meet, and the table of ``nvshim explain CODE``."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from api.errors import ErrorRow, NvshimError
from tools.reference.markdown import prose
from tools.reference.sources import INSTALLED, ROOMS, assigned, causes, modules, remedies

__all__ = ["Entry", "every_error", "is_met", "page", "table"]

_HEAD: Final = """\
# Errors

Look up a code here, or run `nvshim explain CODE` on the node, which also lists the causes. `ctr`,
`kubectl describe pod`, containerd's log and `nvshim` show an error in one line: the code, what
failed and why, what to do. In italics is what to do; `…` depends on the case.

Only `nvshim explain` has the codes that few people meet: those of the protocol between containerd
and the shim, of the simulated node, and of the project's own tools.
"""

_SECTIONS: Final = (
    ("NVSHIM-E01", "The node's driver and GPUs"),
    ("NVSHIM-E02", "What a container asks for"),
    ("NVSHIM-E03", "An image's files"),
    ("NVSHIM-E04", "The container's spec"),
    ("NVSHIM-E05", "Our configuration"),
    ("NVSHIM-E06", "CDI specs"),
    ("NVSHIM-E07", "Other vendors and platforms"),
    ("NVSHIM-E1", "The shim"),
    ("NVSHIM-E27", "The node agent"),
)

_COMMANDS: Final = """\
## Commands

An error of a command says where it fails what to do.

"""

# Errors that only our own programs and callers of the shim's API can cause.
_OF_TOOLS: Final = ("api.", "integration.simulated", "tests.")
_OF_PROTOCOL: Final = ("NVSHIM-E00", "NVSHIM-E100", "NVSHIM-E13", "NVSHIM-E160")

# Modules that are run by path, and define no error.
_SCRIPTS: Final = ("__main__", "nvml_probe")


class Entry(NamedTuple):
    """An error in the table: a class or a row."""

    code: str
    name: str  # the name in the code
    module: str
    slug: str
    status: int
    remedy: str  # its own remedy
    meaning: str  # from the code
    is_branch: bool  # whether it is the base of others


def every_error() -> list[Entry]:
    """Return every error with a code, sorted by code. Imports all of our modules."""
    rooms = tuple(room.replace("/", ".") for room in ROOMS)
    for room in rooms:
        package = importlib.import_module(room)
        for module in pkgutil.walk_packages(package.__path__, f"{room}."):
            if not module.name.endswith(_SCRIPTS):
                importlib.import_module(module.name)
    rows = list(_rows())
    branches = {row.branch for _, _, row in rows}
    entries = [
        Entry(row.code, name, module, row.slug, row.status, row.remedy, row.when, is_branch=False)
        for module, name, row in rows
    ]
    for kind in _descendants(NvshimError):
        own = vars(kind)
        if "code" in own and kind.__module__.startswith(rooms):
            entries.append(
                Entry(
                    kind.code, kind.__name__, kind.__module__, kind.slug, kind.status,
                    own.get("remedy", ""), meaning_of(own.get("__doc__") or ""),
                    is_branch=kind in branches or bool(kind.__subclasses__()),
                )
            )  # fmt: skip
    return sorted(entries)


def _rows() -> Iterator[tuple[str, str, ErrorRow[NvshimError]]]:
    """Yield every row, with its module and its name."""
    for module in modules():
        dotted = module.path.removesuffix(".py").replace("/", ".")
        for name, value in assigned(module.tree):
            if isinstance(value, ast.Call) and getattr(value.func, "attr", "") == "row":
                yield dotted, name, getattr(importlib.import_module(dotted), name)


def _descendants(kind: type[NvshimError]) -> Iterator[type[NvshimError]]:
    for child in kind.__subclasses__():
        yield child
        yield from _descendants(child)


def page() -> str:
    """Return the page of the errors that users meet."""
    advice = remedies()
    left = [each for each in every_error() if is_met(each) and not _is_branch(each, advice)]
    parts = [_HEAD]
    for prefix, title in _SECTIONS:
        mine = [each for each in left if each.code.startswith(prefix)]
        left = [each for each in left if each not in mine]
        parts.append(f"## {title}\n\n" + "".join(_entry(each, advice) for each in mine))
    named = ", ".join(f"**{each.code}** {each.slug}" for each in left)
    return "\n".join([*parts, f"{_COMMANDS}{named}.\n"])


def is_met(entry: Entry) -> bool:
    """Whether users can meet the error without working on the project or speaking its protocol."""
    return not entry.module.startswith(_OF_TOOLS) and not entry.code.startswith(_OF_PROTOCOL)


def _is_branch(entry: Entry, advice: Mapping[str, Sequence[str]]) -> bool:
    """Whether only its subclasses and rows are raised."""
    return entry.is_branch and not _advice(entry, advice)


def _entry(entry: Entry, advice: Mapping[str, Sequence[str]]) -> str:
    remedy = _remedy(entry, advice)
    told = f" *{remedy[0].upper()}{remedy[1:]}.*" if remedy else ""
    return f'- <span id="{entry.code.lower()}"></span>**{entry.code}** {_meaning(entry)}{told}\n'


def _advice(entry: Entry, advice: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the advice where it is raised; without one, that of the table."""
    every = dict.fromkeys((*advice.get(entry.name, ()), *filter(None, (entry.remedy,))))
    return [text for text in every if not any(text in other for other in every if other != text)]


def _remedy(entry: Entry, advice: Mapping[str, Sequence[str]]) -> str:
    """Return the remedy if it is the same in every case."""
    return prose(min(_advice(entry, advice), key=lambda text: "…" in text, default=""))


def _meaning(entry: Entry) -> str:
    """Return the first sentence of the meaning."""
    return prose(re.split(r"(?<=\.)\s", entry.meaning, maxsplit=1)[0])


# -- for nvshim explain -------------------------------------------------------------------------


def table() -> str:
    """Return every error of installed code, by code, for :mod:`integration.doctor.codes`.

    Returns:
        JSON with one error on each line.
    """
    found, advice = causes(INSTALLED), remedies(INSTALLED)
    told = {
        each.code: {
            "name": each.slug.replace("-", " "),
            "meaning": _plain(each.meaning),
            "causes": found.get(each.name, ()),
            "remedies": list(
                dict.fromkeys((*advice.get(each.name, ()), *filter(None, (each.remedy,))))
            ),
        }
        for each in every_error()
        if each.module.startswith(tuple(f"{room}." for room in INSTALLED))
    }
    lines = (f"{json.dumps(c)}: {json.dumps(t, ensure_ascii=False)}" for c, t in told.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


_WHERE: Final = re.compile(r"\s*Raised (?:by|at|in|when|for|where|if)\b[^.]*(?:\.[^\s.][^.]*)*\.")
_ROLE: Final = re.compile(r":\w+:`~?(?:[\w.]+\.)?(\w+)`")


def meaning_of(docstring: str) -> str:
    """Return what an error means, from its docstring, without details for programmers."""
    text = inspect.cleandoc(docstring).partition("\n\nAttributes:")[0].partition("\n\nArgs:")[0]
    return _WHERE.sub("", text)


def _plain(text: str) -> str:
    """Return text without markup."""
    return " ".join(_ROLE.sub(r"\1", text).replace("``", "`").split())
