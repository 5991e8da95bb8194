"""``nvshim health``: what the node agent thinks of the devices, and putting one back by hand."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any, Final

import click

from integration.cli import exits
from integration.cli.options import configured, with_output
from integration.cli.output import Column, Output
from integration.inspection.health import clear as put_back
from integration.inspection.health import health_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hooks.config import Config

__all__ = ["command"]


def _time(value: Any) -> str:
    if not value:
        return "-"
    then = dt.datetime.fromtimestamp(value, tz=dt.UTC)
    return then.isoformat(timespec="seconds").replace("+00:00", "Z")


_COLUMNS: Final = (
    Column("DEVICE", "uuid"),
    Column("STATE", "state"),
    Column("SINCE", "since", _time),
    Column("REASON", "reason"),
    Column("CONTAINERS", "containers"),
    Column("DO", "do"),
)


@click.group("health")
def command() -> None:
    """Tell what the node agent thinks of this node's devices, and put one back."""


@command.command("list")
@with_output
@configured
def list_(output: Output, config: Config) -> None:
    r"""List what is thought of each GPU and MIG device, and why.

    The exit status is 3 if one is not given to containers.

    \b
    Keys of -o json, of each: uuid, kind (gpu, mig), gpu, state (healthy, suspect, unhealthy,
    recovering), given, since (seconds since the epoch), reason, xid (the last that counted),
    containers (that the reason is attributed to), do.
    """
    _show(output, health_rows(config))


@command.command("clear")
@with_output
@configured
@click.argument("devices", nargs=-1, required=True, metavar="UUID...")
def clear(output: Output, config: Config, *, devices: Sequence[str]) -> None:
    """Put devices back that are not healthy, without a proof; a GPU with its MIG devices.

    A UUID may be cut short. What does not answer stays unhealthy; what fails again is unhealthy
    again. The exit status is 3 if one is still not given. The answer is that of list.
    """
    _show(output, put_back(config, devices))


def _show(output: Output, rows: Sequence[dict[str, Any]]) -> None:
    output.rows(rows, _COLUMNS)
    if not all(row["given"] for row in rows):
        click.get_current_context().exit(exits.FOUND)
