"""``nvshim ledger``: GPUs held by mistake, faults, and the claims of [sharing]."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any, Final

import anyio
import click

from api.errors import printable
from hooks.config import Config
from integration.cli.kinds import HOLDINGS
from integration.cli.options import (
    configured,
    found_if,
    holding,
    located,
    pod_resources_option,
    with_listing,
    with_output,
)
from integration.cli.output import Column, Output, by_index, title_of
from integration.containers.held_devices import indexes_of
from integration.inspection.ledger_query import ask, foreign_rows
from integration.node.holders.leases import claim_rows
from integration.node.holders.leases import release as remove
from integration.node.holders.values import as_document
from integration.node.services.causes.query import fault_of, fault_rows

Places = tuple[Sequence[str], str, str]
"""containerd's state directories, procfs, and the kubelet's pod-resources socket."""


def _wrong(row: Mapping[str, Any]) -> str:
    return "; ".join(filter(None, (row["stale"], row["orphan"])))


def _shares(row: Mapping[str, Any]) -> list[str]:
    return [f"{each['memory_bytes'] / (1 << 30):.1f} GiB" for each in row["shares"]]


def _allocated_to(row: Mapping[str, Any]) -> str:
    return f"{row['namespace']}/{row['pod']}/{row['container']}"


def _time(value: float) -> str:
    return dt.datetime.fromtimestamp(value, tz=dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _fault(row: Mapping[str, Any]) -> str:
    return f"Xid {row['xid']}: {row['what']}" if row["xid"] else str(row["what"])


_HOLDINGS: Final = (
    Column("CONTAINER", title_of),
    Column("PID", "pid", right=True),
    Column("GPUS", lambda row: by_index(row["devices"], row["device_indexes"])),
    Column("DEVICES", "devices", wide=True),
    Column("SHARES", _shares, wide=True),
    Column("WRONG", _wrong),
    Column("FAULT", "fault"),
)
_UNHELD: Final = (
    Column("ALLOCATED TO", _allocated_to),
    Column("RESOURCE", "resource"),
    Column("DEVICE", "device"),
    Column("RUNS WITHOUT", "pid", lambda pid: f"process {pid}" if pid else "-"),
)
_FOREIGN: Final = (
    Column("PROCESS", "pid", right=True),
    Column("NAME", "name"),
    Column("DEVICES", "devices"),
)
_FAULTS: Final = (
    Column("TIME", "at", _time),
    Column("CONTAINER", title_of),
    Column("FAULT", _fault),
    Column("GPU", lambda row: row["mig"] or row["gpu"], wide=True),
    Column("PROCESS", "pid", right=True, wide=True),
    Column("WHOSE", lambda row: row["whose"] + ("" if row["sure"] else "?")),
    Column("DO", "do"),
    Column("KNOWN FROM", "source", wide=True),
)
_CLAIMS: Final = (
    Column("CLAIM", "claim"),
    Column("CONTAINER", "container"),
    Column("DEVICES", "devices"),
    Column("DEAD", "dead"),
)


@click.group("ledger")
def command() -> None:
    """Find GPUs held by mistake, list faults, release dead claims; see also `nvshim ps --gpus`.

    The containers' bundles are read now; no agent is needed.
    """


@command.command("list", hidden=True)
@with_listing
@configured
@located
@holding
def list_(
    output: Output,
    config: Config,
    *,
    states: tuple[str, ...],
    proc: str,
    pod_resources: str,
    stale: bool,
    orphans: bool,
) -> None:
    """List the containers that hold a GPU, as `nvshim ps --gpus` does."""
    show_holdings(output, config, (states, proc, pod_resources), stale=stale, orphans=orphans)


def show_holdings(
    output: Output, config: Config, places: Places, *, stale: bool, orphans: bool
) -> None:
    """List the containers that hold a GPU.

    Args:
        places: the state directories, procfs and the pod-resources socket to read.
        stale: show only containers with an outdated driver; with ``orphans``, either kind.
        orphans: show only running containers without a shim, or unknown to the kubelet.
    """
    rows = _look(config, places)["holdings"]
    if stale or orphans:
        rows = [row for row in rows if (stale and row["stale"]) or (orphans and row["orphan"])]
    output.kind = HOLDINGS
    output.rows(rows, _HOLDINGS)


@command.command("check")
@with_listing
@configured
@located
@pod_resources_option
def check(
    output: Output, config: Config, *, states: tuple[str, ...], proc: str, pod_resources: str
) -> None:
    """Find GPUs held by mistake: stale containers, orphans, and containers without their device.

    Also listed: devices that the kubelet allocated and no container holds (normal while an image is
    pulled, a fault if the container runs), processes outside containers on a GPU, and requests of
    pods that were denied. The exit status is 3 if a container is stale, an orphan, or runs without
    its device.
    """
    places = (states, proc, pod_resources)
    found = _look(config, places)
    found["foreign"] = anyio.run(foreign_rows, config, states, proc)
    found["holdings"] = [row for row in found["holdings"] if row["stale"] or row["orphan"]]
    if output.form.is_document:
        output.document(found)
    else:
        tables: tuple[tuple[Any, Sequence[Column]], ...] = (
            (found["holdings"], _HOLDINGS), (found["unheld"], _UNHELD), (found["foreign"], _FOREIGN)
        )  # fmt: skip
        for rows, columns in tables:
            if rows:
                output.rows(rows, columns)
        for row in found["denied"]:
            title = f"{row['namespace']}/{row['pod']}/{row['container']}"
            click.echo(printable(f"{title} was denied {row['why']}"))
        for line in found["unknown"]:
            click.echo(printable(line), err=True)
    found_if(found["holdings"] or any(row["pid"] for row in found["unheld"]))


@command.command("faults")
@with_listing
@configured
def faults(output: Output, config: Config) -> None:
    """List the GPU faults that affected containers, as recorded by the node agent.

    WHOSE is the cause: the device, the host (its driver), the application, a neighbour on the same
    GPU, or unclear; a ? marks an uncertain cause. Removed containers are listed for ten minutes.
    """
    output.rows(fault_rows(config), _FAULTS)


@command.command("claims")
@with_listing
@configured
def claims(output: Output, config: Config) -> None:
    """List the claims with which [sharing] limits the containers on a device.

    A claim is dead if its container has exited or was removed; it no longer counts.
    """
    output.rows(claim_rows(config), _CLAIMS)


@command.command("release")
@with_output
@configured
@click.argument("names", metavar="[CLAIM|CONTAINER|BUNDLE]...", nargs=-1)
def release(output: Output, config: Config, *, names: tuple[str, ...]) -> None:
    """Remove dead claims: the named ones, or all. A claim of a running container is not removed.

    A dead claim no longer counts, and the next container on the device would remove it.
    """
    removed = remove(config, names)
    output.text("\n".join(removed) or "nothing to release", {"released": removed})


def _look(config: Config, places: Places) -> dict[str, Any]:
    ledger, inventory = anyio.run(ask, config, *places)
    found = as_document(ledger)
    indexes = indexes_of(inventory)
    for row in found["holdings"]:
        row["device_indexes"] = [indexes.get(name) for name in row["devices"]]
        row["fault"] = fault_of(config, row["namespace"], row["id"])
    return found
