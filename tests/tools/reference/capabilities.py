"""What each driver capability brings, from the engine's table."""

from __future__ import annotations

from typing import Final

from hooks.node.capabilities import (
    ALWAYS,
    CONTROL,
    FILES,
    NODES,
    ConfigFile,
    Firmware,
    Library,
    Program,
    Row,
    Socket,
    XorgModule,
    wants_drm,
)
from tests.tools.reference.markdown import code, table

__all__ = ["tables"]

_KINDS: Final = (Library, Program, ConfigFile, XorgModule, Socket)


def tables() -> str:
    """One row for each capability; one that has all of another names that, and what it adds."""
    rows = []
    for capability, mine in FILES.items():
        if not mine:
            continue
        part = _part_of(capability)
        added = [row for row in mine if part is None or row not in FILES[part]]
        nodes = [code(node.path) for node in NODES[capability]]
        if wants_drm([capability]):
            nodes.append("`/dev/dri` nodes of its GPUs, by-path links")
        files = [text for kind in _KINDS if (text := _listed(added, kind))]
        if part is not None:
            files.insert(0, f"all of {code(part)}")
        rows.append((code(capability), "; ".join(files), ", ".join(nodes)))
    always = [
        f"firmware {_listed(ALWAYS, Firmware)}",
        "`/proc/driver/nvidia/params` with `ModifyDeviceFiles: 0`, read-only",
    ]
    gpus = (
        f"{code(CONTROL.path)}, `/dev/nvidiaN` of each GPU, `/dev/nvidia-caps/nvidia-capN` of MIG"
    )
    rows.append(("always", "; ".join(always), gpus))
    return table(("capability", "files", "nodes"), rows)


def _part_of(capability: str) -> str | None:
    """The capability all of whose rows this one has, besides its own."""
    mine = set(FILES[capability])
    for other, rows in FILES.items():
        if rows and other != capability and set(rows) < mine:
            return other
    return None


def _listed(rows: tuple[Row, ...] | list[Row], kind: type[Row]) -> str:
    return ", ".join(_one(row) for row in rows if isinstance(row, kind))


def _one(row: Row) -> str:
    if isinstance(row, (Library, XorgModule)):
        name = f"{row.directory}/{row.name}" if row.directory else row.name
        links = ", ".join(code(link) for link in row.links)
        return code(name) + (f" ({links})" if links else "")
    if isinstance(row, ConfigFile):
        return code(f"{row.below}/{row.name}")
    if isinstance(row, Socket):
        return code(row.path)
    return code(f"/lib/firmware/nvidia/{{v}}/{row.name}" if isinstance(row, Firmware) else row.name)
