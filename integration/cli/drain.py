"""``nvshim drain``: take a GPU, a MIG device or the driver out of service."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

from hooks.config import Config
from integration.cli.options import configured, found_if, located, stacked, with_output
from integration.cli.output import Column, Output, counted
from integration.cli.progress import Progress
from integration.drain.serving import DrainOptions, answer_of, drain

_UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_TIME: Final = re.compile(r"(\d{1,6})([smhd]?)", re.ASCII)
_EVER: Final = "ever"


def _seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """How long something may take: "90", "90s", "5m", "2h"; None if that was not said."""
    if value is None or value == _EVER:
        return None if value is None else math.inf
    found = _TIME.fullmatch(value)
    if found is None:
        raise click.BadParameter(f"{value!r} is no time: write 90, 90s, 5m or 2h", ctx, param)
    return float(int(found[1]) * _UNITS[found[2]])


ending = stacked(
    click.option("--reason", metavar="TEXT", default="",
                 help="Why, for whoever is refused the device."),
    click.option("--wait", callback=_seconds, is_flag=False, flag_value=_EVER, metavar="[TIME]",
                 help="Wait until nobody holds it; so long at most: 90s, 5m, 2h."),
    click.option("--force", is_flag=True, help="End the containers that hold it: SIGTERM, and "
                 "after the grace period SIGKILL."),
    click.option("--grace", callback=_seconds, default="30s", show_default=True, metavar="TIME",
                 help="How long they have to end."),
)  # fmt: skip
"""What a command has that may wait for who holds a device, or end them."""


def wish_of(
    *, reason: str, wait: float | None, force: bool, grace: float, lets_go: bool,
    states: tuple[str, ...], proc: str,
) -> DrainOptions:  # fmt: skip
    """What the options say."""
    if force and wait is None:
        wait = math.inf
    return DrainOptions(
        reason=" ".join(reason.split()), seconds=wait, grace=grace if force else None,
        lets_go=lets_go, states=states, proc=proc,
    )  # fmt: skip


_HOLDERS: Final = (
    Column("HELD BY", "name"),
    Column("KIND", "kind"),
    Column("PID", "pid", right=True),
    Column("HOLDS", "devices"),
    Column("LETS GO BY", "do"),
)


def show(output: Output, answer: Mapping[str, Any]) -> None:
    """Show what is out of service and who holds it; a person reads first what matters.

    Args:
        answer: of :func:`integration.drain.serving.answer_of`.
    """
    if output.form.is_document:
        output.document(answer)
        return
    for device in answer["devices"]:
        click.echo(f"{device['name']} is out of service {device['why']}")
    holders: Sequence[Mapping[str, Any]] = answer["holders"]
    if holders:
        output.table(holders, _HOLDERS)
    if not answer["free"]:
        click.echo(f"not free: {counted(len(holders), 'holder')}; --wait waits for all of them")
    elif holders:
        click.echo("free, but for the node agent: --let-go before a reset by hand or a MIG change")
    else:
        click.echo("free")


@click.command("drain")
@with_output
@configured
@located
@click.argument("devices", nargs=-1, metavar="[GPU|MIG DEVICE]...")
@click.option("--driver", is_flag=True, help="The driver, and so every device that it has.")
@ending
@click.option(
    "--let-go", "lets_go", is_flag=True,
    help="Have the node agent close NVML, and so every GPU, until the device is in service again."
    "  --driver does so by itself.",
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
    r"""Take devices out of service: no new container gets them, until `nvshim undrain`.

    The shim refuses who asks for them by name, `all` is the others, and the kubelet hears that they
    are unhealthy. Running containers go on, and are listed with everybody else who holds a device.
    It outlives restarts of the node. A device is named by index (3, 3:0), UUID or PCI address.

    With --wait the exit status is 3 if somebody still holds one when the time is up.

    \b
    nvshim drain 3 --reason "fan is replaced" --wait=10m
    nvshim drain 3 --force --grace=60s     ends the containers that hold it
    nvshim drain --driver --wait           before an update of the driver
    """
    if not devices and not driver:
        raise click.UsageError("Name a device, or --driver.")
    if devices and driver:
        raise click.UsageError("--driver is every device: name none beside it.")
    wish = wish_of(wait=wait, **more)
    with Progress(output) as progress:
        result = drain(config, devices, wish, progress.say)
    answer = answer_of(result)
    show(output, answer)
    found_if(wish.seconds is not None and not answer["free"])
