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

__all__ = ["page"]

_HEAD: Final = """\
# Driver capabilities

What a container gets of the driver, by the words of `NVIDIA_DRIVER_CAPABILITIES`; without that
variable it is `compute,utility`. `{v}` is the driver's version. A file that a driver does not have
is left out, and `nvshim explain` lists it. Libraries are mounted where the image's loader looks;
a library's soname is a link beside it, and the names in brackets are further links. `compat32`
brings the libraries of the other capabilities once more, for the 32-bit architecture.
"""


def page() -> str:
    """The page of all capabilities."""
    parts = [_HEAD]
    for capability, rows in FILES.items():
        if not rows:
            continue
        nodes = [node.path for node in NODES[capability]]
        lines = [
            ("libraries", _listed(rows, Library)),
            ("programs", _listed(rows, Program)),
            ("files", _listed(rows, ConfigFile)),
            ("X server", _listed(rows, XorgModule)),
            ("sockets", _listed(rows, Socket)),
            ("nodes", ", ".join(code(node) for node in nodes)),
        ]
        if wants_drm([capability]):
            lines.append(
                ("nodes of its GPUs", "`/dev/dri/cardN`, `/dev/dri/renderDN`, by-path links")
            )
        kept = [line for line in lines if line[1]]
        parts.append(f"## {capability}\n\n" + table(("", ""), kept))
    always = _listed(ALWAYS, Firmware)
    parts.append(
        "## Always\n\n"
        + table(
            ("", ""),
            [
                ("nodes", f"{code(CONTROL.path)}, and `/dev/nvidiaN` of each granted GPU"),
                ("nodes of MIG devices", "`/dev/nvidia-caps/nvidia-capN` of their instances"),
                ("firmware", always),
                ("procfs", "`/proc/driver/nvidia/params` with `ModifyDeviceFiles: 0`, read-only"),
            ],
        )
    )
    return "\n".join(parts)


def _listed(rows: tuple[Row, ...], kind: type[Row]) -> str:
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
