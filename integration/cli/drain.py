"""``nvshim drain``: take a GPU, a MIG device or the driver out of service."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

from api.errors import printable
from hooks.config import Config
from integration.cli.options import configured, found_if, located, stacked, with_output
from integration.cli.output import Column, Output, counted
from integration.cli.progress import Progress
from integration.drain.serving import DrainOptions, answer_of, drain

_UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_TIME: Final = re.compile(r"(\d{1,6})([smhd]?)", re.ASCII)
_FOREVER: Final = "ever"
_LONGEST_REASON: Final = 1000


def _seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Parse a time such as "90", "90s", "5m" or "2h"; None if not given."""
    if value is None or value == _FOREVER:
        return None if value is None else math.inf
    found = _TIME.fullmatch(value)
    if found is None:
        raise click.BadParameter(f"{value!r} is not a time: write 90, 90s, 5m or 2h", ctx, param)
    return float(int(found[1]) * _UNITS[found[2]])


def _reason(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """Return a reason as one line; a mark has room for so much."""
    text = " ".join(value.split())
    if len(text) > _LONGEST_REASON:
        raise click.BadParameter(f"Longer than {_LONGEST_REASON} characters.", ctx, param)
    return text


holder_options = stacked(
    click.option("--reason", metavar="TEXT", default="", callback=_reason,
                 help="The reason, shown where the device is refused."),
    click.option("--wait", callback=_seconds, is_flag=False, flag_value=_FOREVER, metavar="[TIME]",
                 help="Wait until no process holds the device, at most this long: 90s, 5m, 2h."),
    click.option("--force", is_flag=True, help="Stop the containers that hold the device: SIGTERM, "
                 "and SIGKILL after the grace period."),
    click.option("--grace", callback=_seconds, default="30s", show_default=True, metavar="TIME",
                 help="The grace period of --force."),
)  # fmt: skip
"""The options of commands that wait for the holders of a device, or stop them."""


def drain_request(
    *, reason: str, wait: float | None, force: bool, grace: float, lets_go: bool,
    states: tuple[str, ...], proc: str,
) -> DrainOptions:  # fmt: skip
    """Return the request that the options describe."""
    if force and wait is None:
        wait = math.inf
    return DrainOptions(
        reason=reason, seconds=wait, grace=grace if force else None,
        lets_go=lets_go, states=states, proc=proc,
    )  # fmt: skip


HOLDER_COLUMNS: Final = (
    Column("HELD BY", "name"),
    Column("KIND", "kind"),
    Column("PID", "pid", right=True),
    Column("HOLDS", "devices"),
    Column("RELEASED BY", "do"),
)


def show(output: Output, answer: Mapping[str, Any]) -> None:
    """Show the devices that are out of service, their holders, and whether they are free.

    Args:
        answer: the result of :func:`integration.drain.serving.answer_of`.
    """
    if output.form.is_document:
        output.document(answer)
        return
    for device in answer["devices"]:
        click.echo(printable(f"{device['name']} is out of service {device['why']}"))
    holders: Sequence[Mapping[str, Any]] = answer["holders"]
    if holders:
        output.table(holders, HOLDER_COLUMNS)
    if not answer["free"]:
        click.echo(f"not free: {counted(len(holders), 'holder')}; --wait waits for all of them")
    elif holders:
        click.echo(
            "free except for the node agent; use --let-go before a manual reset or MIG change"
        )
    else:
        click.echo("free")


@click.command("drain")
@with_output
@configured
@located
@click.argument("devices", nargs=-1, metavar="[GPU|MIG DEVICE]...")
@click.option("--driver", is_flag=True, help="Drain the driver, and with it every device.")
@holder_options
@click.option(
    "--let-go", "lets_go", is_flag=True,
    help="Make the node agent close NVML, and with it every GPU, until the device is back in"
    " service.  --driver implies this.",
)  # fmt: skip
def command(
    output: Output,
    config: Config,
    *,
    devices: tuple[str, ...],
    driver: bool,
    wait: float | None,
    **more: Any,
) -> None:
    r"""Take devices out of service: no new container gets them until `nvshim undrain`.

    The shim refuses requests for them by name, `all` leaves them out, and the kubelet sees them as
    unhealthy. Running containers keep running; they are listed with all other holders. A drain
    survives reboots. Name a device by index (3, 3:0), UUID or PCI address.

    With --wait the exit status is 3 if a device is still held when the time is up.

    \b
    nvshim drain 3 --reason "replacing the fan" --wait=10m
    nvshim drain 3 --force --grace=60s     stop the containers that hold it
    nvshim drain --driver --wait           before an update of the driver
    """
    if not devices and not driver:
        raise click.UsageError("Name a device, or --driver.")
    if devices and driver:
        raise click.UsageError("--driver includes every device; do not name others.")
    request = drain_request(wait=wait, **more)
    with Progress(output) as progress:
        result = drain(config, devices, request, progress.update)
    answer = answer_of(result)
    show(output, answer)
    found_if(request.seconds is not None and not answer["free"])
