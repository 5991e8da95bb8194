"""``nvshim ledger``: what should not hold a GPU and does, faults, and claims of the dead."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

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

if TYPE_CHECKING:
    Places = tuple[Sequence[str], str, str]
    """containerd's state directories, procfs, and the kubelet's pod-resources socket."""


def _wrong(row: Mapping[str, Any]) -> str:
    return "; ".join(filter(None, (row["stale"], row["orphan"])))


def _shares(row: Mapping[str, Any]) -> list[str]:
    return [f"{each['memory_bytes'] / (1 << 30):.1f} GiB" for each in row["shares"]]


def _given_to(row: Mapping[str, Any]) -> str:
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
    Column("GIVEN TO", _given_to),
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

    It goes by the containers' bundles, now, whether or not an agent runs.
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
        places: where to look.
        stale: only those whose driver is gone.
        orphans: only those that nobody seems to know of; or either of both.
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
    """Find what should not be: the exit status is 3 if a holding is stale, an orphan, or missing.

    Devices that the kubelet has given and nobody holds are listed too. That is a fault if the
    container runs without its device; until its image is there, it is so with every pod. Processes
    on a GPU that are in no container are listed, too, and what containers of pods requested and
    were not given.
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
            click.echo(printable(f"{title} was not given {row['why']}"))
        for line in found["unknown"]:
            click.echo(printable(line), err=True)
    found_if(found["holdings"] or any(row["pid"] for row in found["unheld"]))


@command.command("faults")
@with_listing
@configured
def faults(output: Output, config: Config) -> None:
    """List the faults that containers had to do with, as the node agent has kept them.

    WHOSE is whose fault it was to that container: the device's, the host's (its driver), the
    application's, a neighbour's on the same GPU, or unclear; a ? stands behind what is not sure.
    Containers that are gone are listed for ten minutes.
    """
    output.rows(fault_rows(config), _FAULTS)


@command.command("claims")
@with_listing
@configured
def claims(output: Output, config: Config) -> None:
    """List the claims by which [sharing] limits who may have a device.

    A dead claim is one whose container has ended, or is gone: it counts no more.
    """
    output.rows(claim_rows(config), _CLAIMS)


@command.command("release")
@with_output
@configured
@click.argument("names", metavar="[CLAIM|CONTAINER|BUNDLE]...", nargs=-1)
def release(output: Output, config: Config, *, names: tuple[str, ...]) -> None:
    """Remove dead claims: those that are named, or all. One that holds is refused.

    A dead claim counts no more, and the next container that is made would remove it.
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
