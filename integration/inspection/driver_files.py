"""Find which capability a file of NVIDIA's driver belongs to, and whether this node has it.

The table is that of :mod:`hooks.node.capabilities`. Programs ask for a library by its soname or by
a name without a version, but the table has full file names, so only the part up to ``.so`` is
compared.
"""

from __future__ import annotations

import fnmatch
import os
import posixpath
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from api.errors import NvshimError
from hooks.config import Config
from hooks.node.capabilities import (
    ALWAYS,
    CONTROL,
    FILES,
    NODES,
    OTHERS,
    ConfigFile,
    ControlNode,
    Firmware,
    Library,
    Program,
    Row,
    Socket,
    XorgModule,
    every_row,
    nodes_of,
)
from hooks.words import CAPABILITIES
from integration.nvml.inventory import look_at_node

DriverRow: TypeAlias = Row | ControlNode

ORDER: Final = ("compute", "utility", "graphics", "video", "display", "ngx", "compat32")
"""The order in which capabilities are shown."""


@dataclass(frozen=True, slots=True)
class OnNode:
    """What this node has of a file."""

    paths: tuple[str, ...] = ()  # where it is on the host
    driver: str = ""  # the version of the driver; "" if there is none
    error: str = ""  # why there is no driver


def rows_named(name: str) -> tuple[DriverRow, ...]:
    """Return the rows of the table that a name can stand for.

    Args:
        name: a file name, a soname, a link or a path ("libnvcuvid.so.1", "/dev/nvidia-uvm").
    """
    rows: tuple[DriverRow, ...] = (*every_row(), *nodes_of(CAPABILITIES))
    return tuple(row for row in rows if _is_named(row, name))


def _is_named(row: DriverRow, name: str) -> bool:
    base = posixpath.basename(name)
    match row:
        case Library(file, links) | XorgModule(file, links=links):
            known = (file, *map(posixpath.basename, links))
            return any(base == each or _stem(base) == _stem(each) for each in known)
        case ConfigFile(file):
            parts, wanted = name.strip("/").split("/"), file.replace("{v}", "*").split("/")
            last = min(len(parts), len(wanted))
            return fnmatch.fnmatchcase("/".join(parts[-last:]), "/".join(wanted[-last:]))
        case Firmware(pattern):
            return fnmatch.fnmatchcase(base, pattern)
        case Program(program):
            # NAMESPACE/POD may end in the same name.
            return base == program and (name == base or name.startswith("/"))
        case Socket(path) | ControlNode(path):
            return name in {path, posixpath.basename(path)}


def _stem(name: str) -> str:
    return name.partition(".so")[0]


def capabilities_of(rows: Iterable[DriverRow]) -> tuple[str, ...]:
    """Return the capabilities that have any of some rows; empty for what every container gets."""
    wanted = set(rows)
    if CONTROL in wanted or not wanted.isdisjoint(ALWAYS):
        return ()
    return tuple(c for c in ORDER if not wanted.isdisjoint((*FILES[c], *NODES[c])))


def find_on_node(rows: Iterable[DriverRow], config: Config) -> OnNode:
    """Look for the files of some rows on this node, without asking NVML.

    Args:
        rows: the rows.
        config: where the node's driver and devices are.
    """
    wanted = tuple(rows)
    try:
        inventory = look_at_node(config, nvml=False)
    except NvshimError as error:
        return OnNode(error=error.sentence)
    driver = inventory.driver
    names = {row.name for row in wanted if not isinstance(row, Socket | ControlNode)}
    paths = [lib.source for lib in driver.libraries if lib.row in names and lib.arch == driver.arch]
    paths += [file.source for file in driver.files if file.row in names]
    for row in wanted:
        if isinstance(row, Socket) and row.path in inventory.sockets:
            paths.append(inventory.sockets[row.path])
        elif isinstance(row, ControlNode):
            path = os.path.join(config.dev, row.path.removeprefix("/dev/"))
            paths += [path] if os.path.exists(path) else []
    return OnNode(tuple(dict.fromkeys(paths)), driver.version)


def find_other(name: str, config: Config) -> OnNode | None:
    """Look on this node for a library of the driver that is in no row of the table.

    Args:
        name: a file name or a soname.
        config: where the node's driver is.

    Returns:
        What the node has; None if there is no such library.
    """
    base = posixpath.basename(name)
    if ".so" not in base:
        return None
    try:
        driver = look_at_node(config, nvml=False).driver
    except NvshimError:
        return None
    others = (lib for lib in driver.libraries if lib.row == OTHERS.name)
    paths = tuple(lib.source for lib in others if _stem(lib.name) == _stem(base))
    return OnNode(paths, driver.version) if paths else None
