"""``nvshim list``: the node's GPUs and MIG devices, and which containers have them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from integration.cli.options import configured, located, with_output
from integration.cli.output import Column, Format, Output, plain, title_of
from integration.inspection.errors import StateUnreadable
from integration.inspection.gpus import list_gpus
from integration.inspection.health import read_health
from integration.inspection.processes import all_containers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hooks.config import Config

__all__ = ["command"]


def _holders(containers: Sequence[Mapping[str, Any]] | None) -> str:
    if containers is None:
        return "?"
    return plain([
        title_of(container) + (" (stale)" if container["stale"] else "")
        for container in containers
    ])  # fmt: skip


def _index(row: Mapping[str, Any]) -> str:
    if row["mig_index"] is None:
        return plain(row["index"])
    return f"{row['index']}:{row['mig_index']}"


def _state(row: Mapping[str, Any]) -> str:
    if row["fault"]:
        return str(row["fault"])
    if row["excluded"]:
        return "excluded"
    if row["health"] in {None, "healthy"}:
        return "ok" if row["health"] else "-"
    return f"{row['health']}: {row['health_reason']}"


_COLUMNS: Final = (
    Column("INDEX", "shown_index", right=True),
    Column("NAME", "name"),
    Column("UUID", "uuid"),
    Column("PCI", "pci"),
    Column("MINOR", "minor", right=True),
    Column("PROFILE", "profile"),
    Column("NUMA", "numa_node", right=True),
    Column("HEALTH", "shown_state"),
    Column("CONTAINERS", "containers", _holders),
)


@click.command("list")
@with_output
@configured
@located
@click.option(
    "--nvml/--no-nvml", default=True, show_default=True,
    help="Ask NVML if no inventory is kept; without it MIG devices are unknown.",
)  # fmt: skip
def command(
    output: Output, config: Config, *, states: tuple[str, ...], proc: str, nvml: bool
) -> None:
    r"""List the node's GPUs and MIG devices, and the running containers that have them.

    \b
    Keys of -o json, of each: kind (gpu, mig), vendor, index, mig_index, uuid, name, pci, minor,
    profile, mig_mode, memory_bytes, numa_node, health (healthy, suspect, unhealthy, recovering;
    null where no agent watches), health_reason, fault, excluded, containers (each with id,
    namespace, pod, name, sandbox, pid, stale: what of the driver that it was made with is no more,
    or null; null if the caller may not know).
    """
    try:
        containers = all_containers(states, proc)
    except StateUnreadable as error:
        containers = None
        click.echo(str(error), err=True)
    rows = list_gpus(config, containers, nvml=nvml, health=read_health(config))
    if output.form is Format.TABLE:
        rows = [{**row, "shown_index": _index(row), "shown_state": _state(row)} for row in rows]
    output.rows(rows, _COLUMNS)
