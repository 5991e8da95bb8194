"""The errors: those that people meet as a page, and all as the table of ``nvshim explain CODE``."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from api.errors import NvshimError
from tools.reference.markdown import prose
from tools.reference.sources import INSTALLED, ROOMS, causes, remedies

__all__ = ["every_error", "is_met", "page", "table"]

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

# What only our own programs, and those who call the shim as containerd does, can cause.
_OF_TOOLS: Final = ("api.", "integration.simulated", "tests.")
_OF_PROTOCOL: Final = ("NVSHIM-E00", "NVSHIM-E100", "NVSHIM-E13", "NVSHIM-E160")

# Run by path, and define no error.
_SCRIPTS: Final = ("__main__", "nvml_probe")


def every_error() -> list[type[NvshimError]]:
    """Every error that is raised, by its code. Imports every module of ours."""
    rooms = tuple(room.replace("/", ".") for room in ROOMS)
    for room in rooms:
        package = importlib.import_module(room)
        for module in pkgutil.walk_packages(package.__path__, f"{room}."):
            if not module.name.endswith(_SCRIPTS):
                importlib.import_module(module.name)
    kinds = {
        kind
        for kind in _descendants(NvshimError)
        if "code" in vars(kind) and kind.__module__.startswith(rooms)
    }
    return sorted(kinds, key=lambda kind: (kind.code, kind.__name__))


def _descendants(kind: type[NvshimError]) -> Iterator[type[NvshimError]]:
    for child in kind.__subclasses__():
        yield child
        yield from _descendants(child)


def page() -> str:
    """The page of the errors that people meet."""
    advice = remedies()
    left = [kind for kind in every_error() if is_met(kind) and not _is_branch(kind, advice)]
    parts = [_HEAD]
    for prefix, title in _SECTIONS:
        mine = [kind for kind in left if kind.code.startswith(prefix)]
        left = [kind for kind in left if kind not in mine]
        parts.append(f"## {title}\n\n" + "".join(_entry(kind, advice) for kind in mine))
    named = ", ".join(f"**{kind.code}** {kind.slug()}" for kind in left)
    return "\n".join([*parts, f"{_COMMANDS}{named}.\n"])


def is_met(kind: type[NvshimError]) -> bool:
    """Whether people meet an error who neither work on the project nor speak its protocol."""
    return not kind.__module__.startswith(_OF_TOOLS) and not kind.code.startswith(_OF_PROTOCOL)


def _is_branch(kind: type[NvshimError], advice: Mapping[str, Sequence[str]]) -> bool:
    """Whether only others that hang on it are raised."""
    return bool(kind.__subclasses__()) and not _advice(kind, advice)


def _entry(kind: type[NvshimError], advice: Mapping[str, Sequence[str]]) -> str:
    remedy = _remedy(kind, advice)
    told = f" *{remedy[0].upper()}{remedy[1:]}.*" if remedy else ""
    return f'- <span id="{kind.code.lower()}"></span>**{kind.code}** {_meaning(kind)}{told}\n'


def _advice(kind: type[NvshimError], advice: Mapping[str, Sequence[str]]) -> list[str]:
    """What is said where it is raised, and what the class says if nothing is said there."""
    by_itself = getattr(kind, "remedy", "")
    every = dict.fromkeys((*advice.get(kind.__name__, ()), *((by_itself,) if by_itself else ())))
    return [text for text in every if not any(text in other for other in every if other != text)]


def _remedy(kind: type[NvshimError], advice: Mapping[str, Sequence[str]]) -> str:
    """One that is the same in every case, if there is one."""
    return prose(min(_advice(kind, advice), key=lambda text: "…" in text, default=""))


def _meaning(kind: type[NvshimError]) -> str:
    """The first sentence of it."""
    return prose(re.split(r"(?<=\.)\s", meaning_of(kind.__doc__ or ""), maxsplit=1)[0])


# -- for nvshim explain -------------------------------------------------------------------------


def table() -> str:
    """Every error of what is installed, by its code, as :mod:`integration.doctor.codes` has it.

    Returns:
        JSON, of which each line is an error.
    """
    found, advice = causes(INSTALLED), remedies(INSTALLED)
    told = {
        kind.code: {
            "name": kind.slug().replace("-", " "),
            "meaning": _plain(meaning_of(vars(kind).get("__doc__") or "")),
            "causes": found.get(kind.__name__, ()),
            "remedies": list(dict.fromkeys((*advice.get(kind.__name__, ()), *_own_remedy(kind)))),
        }
        for kind in every_error()
        if kind.__module__.startswith(tuple(f"{room}." for room in INSTALLED))
    }
    lines = (f"{json.dumps(c)}: {json.dumps(t, ensure_ascii=False)}" for c, t in told.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _own_remedy(kind: type[NvshimError]) -> tuple[str, ...]:
    remedy = vars(kind).get("remedy")
    return (remedy,) if remedy else ()


_WHERE: Final = re.compile(r"\s*Raised (?:by|at|in|when|for|where|if)\b[^.]*(?:\.[^\s.][^.]*)*\.")
_ROLE: Final = re.compile(r":\w+:`~?(?:[\w.]+\.)?(\w+)`")


def meaning_of(docstring: str) -> str:
    """What an error stands for, in the words of its class, without what only a programmer needs."""
    text = inspect.cleandoc(docstring).partition("\n\nAttributes:")[0].partition("\n\nArgs:")[0]
    return _WHERE.sub("", text)


def _plain(text: str) -> str:
    """Without the marks of documentation."""
    return " ".join(_ROLE.sub(r"\1", text).replace("``", "`").split())
