"""The tree of errors as a page: code, meaning, remedy; in an appendix, those few people meet."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from api.errors import NvshimError
from integration.inspection.codes import meaning_of
from tests.tools.reference.markdown import code, prose, table
from tests.tools.reference.sources import ROOMS, remedies

__all__ = ["every_error", "page"]

_HEAD: Final = """\
# Errors

Find the code of an error here, or run `nvshim explain CODE` on the node. `ctr`, `kubectl describe
pod`, containerd's log and `nvshim` show an error in one line: the code, what failed and why, what
to do. In a remedy, `…` depends on the case.
"""

_SECTIONS: Final = (
    ("NVSHIM-E01", "The node's driver and GPUs", ""),
    ("NVSHIM-E02", "What a container asks for", ""),
    ("NVSHIM-E03", "An image's files", ""),
    ("NVSHIM-E04", "The container's spec", ""),
    ("NVSHIM-E05", "Our configuration", ""),
    ("NVSHIM-E06", "CDI specs", ""),
    ("NVSHIM-E07", "Other vendors and platforms", ""),
    ("NVSHIM-E1", "The shim", "Bundles, programs, tasks, stdio, cgroups, checkpoints, sandboxes."),
    ("NVSHIM-E25", "nvshim", "Commands, engines, devices."),
    ("NVSHIM-E26", "nvshim: installation, Kubernetes", ""),
    ("NVSHIM-E27", "The node agent", ""),
    ("NVSHIM-E2", "nvshim: engines' API, containers", ""),
)
_APPENDIX: Final = """\
## Appendix: inside and for developers

ttrpc between containerd and the shim, the simulated node, the demo, and what builds and documents
the project.

"""

# How many of the remedies that the code has for an error are told.
_REMEDIES: Final = 2

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
    """The page of all errors."""
    advice = remedies()
    every = every_error()
    left = [kind for kind in every if not _is_inside(kind) and not _is_branch(kind, advice)]
    parts = [_HEAD]
    for prefix, title, head in _SECTIONS:
        # A longer prefix comes before a shorter one of the same beginning.
        mine = [kind for kind in left if kind.code.startswith(prefix)]
        left = [kind for kind in left if kind not in mine]
        rows = [
            (
                _anchor(kind),
                kind.slug(),
                _meaning(kind),
                "; ".join(prose(text) for text in _advice(kind, advice)[:_REMEDIES]) or "-",
            )
            for kind in mine
        ]
        if rows:
            parts.append(
                f"## {title}\n\n"
                + (f"{head}\n\n" if head else "")
                + table(("code", "name", "meaning", "what to do"), rows)
            )
    if left:
        raise LookupError(f"no section for {left[0].code}")
    inside = [(_anchor(kind), kind.slug(), _meaning(kind)) for kind in every if _is_inside(kind)]
    parts.append(_APPENDIX + table(("code", "name", "meaning"), inside))
    return "\n".join(parts)


def _is_inside(kind: type[NvshimError]) -> bool:
    """Whether only who works on the project, or speaks its protocol, meets an error."""
    rooms = ("api.", "integration.simulated", "tests.")
    return kind.__module__.startswith(rooms) or kind.code.startswith("NVSHIM-E00")


def _is_branch(kind: type[NvshimError], advice: Mapping[str, Sequence[str]]) -> bool:
    """Whether only others that hang on it are raised."""
    return bool(kind.__subclasses__()) and not _advice(kind, advice)


def _anchor(kind: type[NvshimError]) -> str:
    return f'<span id="{kind.code.lower()}"></span>{code(kind.code)}'


def _advice(kind: type[NvshimError], advice: Mapping[str, Sequence[str]]) -> list[str]:
    """What is said where it is raised, and what the class says if nothing is said there."""
    by_itself = getattr(kind, "remedy", "")
    every = dict.fromkeys((*advice.get(kind.__name__, ()), *((by_itself,) if by_itself else ())))
    return [text for text in every if not any(text in other for other in every if other != text)]


def _meaning(kind: type[NvshimError]) -> str:
    return prose(meaning_of(kind.__doc__ or ""))
