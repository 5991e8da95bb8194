"""``nvshim list``: the node's GPUs and MIG devices, and the containers that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

from hooks.config import Config
from integration.cli.health import show_health
from integration.cli.options import configured, located, with_listing
from integration.cli.output import Column, Format, Output, plain, title_of
from integration.containers.errors import StateUnreadable
from integration.containers.shims import all_containers
from integration.inspection.gpus import list_gpus
from integration.node.device_health.report import read_health


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
    if row["out_of_service"]:
        return f"out of service {row['out_of_service']}"
    if row["fault"]:
        return str(row["fault"])
    if row["excluded"]:
        return "excluded"
    if row["health"] in {None, "healthy"}:
        return "ok" if row["health"] else "-"
    return f"{row['health']}: {row['health_reason']}"


def _memory(value: int | None) -> str:
    return "-" if value is None else f"{value / (1 << 30):.0f} GiB"


def _name(row: Mapping[str, Any]) -> Any:
    return row["uuid"] or row["pci"] or row["name"]


def _fabric(place: Mapping[str, Any] | None) -> str:
    if place is None:
        return "-"
    name = place["cluster_uuid"] and f"{place['cluster_uuid']}.{place['clique']}"
    health = "" if place["health"] == "healthy" else place["health"]
    return " ".join(filter(None, (name or place["state"], place["failure"], health)))


_COLUMNS: Final = (
    Column("INDEX", _index, right=True),
    Column("NAME", "name"),
    Column("MEMORY", "memory_bytes", _memory, right=True, wide=True),
    Column("UUID", "uuid", wide=True),
    Column("PCI", "pci", wide=True),
    Column("MINOR", "minor", right=True, wide=True),
    Column("PROFILE", "profile", wide=True),
    Column("NUMA", "numa_node", right=True, wide=True),
    Column("FABRIC", "fabric", _fabric, wide=True),
    Column("HEALTH", _state),
    Column("CONTAINERS", "containers", _holders),
)


@click.command("list")
@with_listing
@configured
@located
@click.option(
    "--nvml/--no-nvml", default=True, show_default=True,
    help="Query NVML if no inventory is stored; without it MIG devices are unknown.",
)  # fmt: skip
@click.option(
    "--health", "only_health", is_flag=True,
    help="Show each device's health instead: since when, why, and what to do."
    "  The exit status is 3 if a device is not allocatable.",
)  # fmt: skip
def command(
    output: Output,
    config: Config,
    *,
    states: tuple[str, ...],
    proc: str,
    nvml: bool,
    only_health: bool,
) -> None:
    r"""List the node's GPUs and MIG devices, and the running containers that hold them.

    HEALTH is - without a node agent. A container is stale if the driver that it was created with
    was replaced.

    \b
    nvshim list -o wide     with UUIDs, PCI addresses and the NVLink fabric
    nvshim list -q          only UUIDs
    """
    if only_health:
        show_health(output, config)
        return
    try:
        containers = all_containers(states, proc)
    except StateUnreadable as error:
        containers = None
        click.echo(str(error), err=True)
    wide = output.form.is_document or output.form is Format.WIDE
    rows = list_gpus(config, containers, nvml=nvml, fabric=wide, health=read_health(config))
    output.rows(rows, _COLUMNS, name=_name)
