"""The tree of errors as a page: code, meaning, status, remedy."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import TYPE_CHECKING, Final

from api.errors import NvshimError, Status
from integration.inspection.codes import meaning_of
from tests.tools.reference.markdown import code, prose, table
from tests.tools.reference.sources import ROOMS, remedies

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ["every_error", "page"]

_HEAD: Final = """\
# Errors

Every failure that a person can cause has a stable code and is one line: what was asked, what was
found, what to do. That line is what `ctr`, `kubectl describe pod`, containerd's log and `nvshim`
show; containerd sees the gRPC status besides. In a remedy, `…` is what depends on the case.
"""

_SECTIONS: Final = (
    ("NVSHIM-E00", "The wire", "ttrpc between containerd and the shim."),
    ("NVSHIM-E01", "The node's driver and GPUs", ""),
    ("NVSHIM-E02", "What a container asks for", ""),
    ("NVSHIM-E03", "An image's files", ""),
    ("NVSHIM-E04", "The container's spec", ""),
    ("NVSHIM-E05", "Our configuration", ""),
    ("NVSHIM-E06", "CDI specs", ""),
    ("NVSHIM-E07", "Other vendors and platforms", ""),
    ("NVSHIM-E1", "The shim", "Bundles, programs, tasks, stdio, cgroups, checkpoints, sandboxes."),
    ("NVSHIM-E25", "nvshim", "Commands, engines, devices."),
    ("NVSHIM-E26", "nvshim: installation, Kubernetes, documentation", ""),
    ("NVSHIM-E27", "The node agent", ""),
    ("NVSHIM-E2", "The simulated node, the demo, a private containerd", ""),
)

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
    left = every_error()
    parts = [_HEAD]
    for prefix, title, head in _SECTIONS:
        # A longer prefix comes before a shorter one of the same beginning.
        mine = [kind for kind in left if kind.code.startswith(prefix)]
        left = [kind for kind in left if kind not in mine]
        rows = [
            (
                f'<span id="{kind.code.lower()}"></span>{code(kind.code)}',
                kind.slug(),
                _meaning(kind),
                _status(kind),
                "; ".join(prose(text) for text in _advice(kind, advice)) or "-",
            )
            for kind in mine
        ]
        if rows:
            parts.append(
                f"## {title}\n\n"
                + (f"{head}\n\n" if head else "")
                + table(("code", "name", "meaning", "status", "what to do"), rows)
            )
    if left:
        raise LookupError(f"no section for {left[0].code}")
    return "\n".join(parts)


def _advice(kind: type[NvshimError], advice: Mapping[str, Sequence[str]]) -> Iterable[str]:
    """What is said where it is raised, and what the class says if nothing is said there."""
    by_itself = getattr(kind, "remedy", "")
    return dict.fromkeys((*advice.get(kind.__name__, ()), *((by_itself,) if by_itself else ())))


def _meaning(kind: type[NvshimError]) -> str:
    return prose(meaning_of(kind.__doc__ or ""))


def _status(kind: type[NvshimError]) -> str:
    if "status" in inspect.signature(kind).parameters:
        return "depends"
    names = {number: name for name, number in vars(Status).items() if name.isupper()}
    return names[kind.status]
