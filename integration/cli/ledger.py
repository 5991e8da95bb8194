"""``nvshim ledger``: who holds which GPU, whether it should be so, and claims of the dead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import anyio
import click

from api.errors import printable
from integration.cli import exits
from integration.cli.options import configured, located, with_output
from integration.cli.output import Column, Format, Output, plain, title_of
from integration.node.ledger.asking import ask, foreign_rows
from integration.node.ledger.claims import claim_rows
from integration.node.ledger.claims import release as remove
from integration.node.ledger.values import as_document

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hooks.config import Config

_POD_RESOURCES: Final = "/var/lib/kubelet/pod-resources/kubelet.sock"

_HOLDINGS: Final = (
    Column("CONTAINER", "shown_title"),
    Column("PID", "pid", right=True),
    Column("DEVICES", "devices"),
    Column("WRONG", "shown_wrong"),
)
_UNHELD: Final = (
    Column("GIVEN TO", "shown_title"),
    Column("RESOURCE", "resource"),
    Column("DEVICE", "device"),
    Column("RUNS WITHOUT", "shown_missing"),
)
_FOREIGN: Final = (
    Column("PROCESS", "pid", right=True),
    Column("NAME", "name"),
    Column("DEVICES", "devices"),
)
_CLAIMS: Final = (
    Column("CLAIM", "claim"),
    Column("CONTAINER", "container"),
    Column("DEVICES", "devices"),
    Column("DEAD", "dead"),
)


@click.group("ledger")
def command() -> None:
    """Tell who holds which GPU: by the containers' bundles, now, whether or not an agent runs."""


def _asked(function: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--pod-resources", metavar="SOCKET", default=_POD_RESOURCES, show_default=True,
        type=click.Path(dir_okay=False),
        help="Where a kubelet tells what it has given to whom; where it is not, it is not asked.",
    )(function)  # fmt: skip


@command.command("list")
@with_output
@configured
@located
@_asked
@click.option("--stale", is_flag=True, help="Only those whose driver is no more: to be drained.")
@click.option("--orphans", is_flag=True, help="Only those that nobody seems to know of.")
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
    r"""List the containers that hold a device, from before they run until they have ended.

    \b
    Keys of -o json, of each: id, namespace, pod, name, sandbox, pid (null before it runs), bundle,
    devices (UUIDs of GPUs and MIG devices), gpus (UUIDs of the GPUs of which they are), stale,
    orphan (null, or what is wrong).
    """
    rows = _look(config, states, proc, pod_resources)["holdings"]
    if stale or orphans:
        rows = [row for row in rows if (stale and row["stale"]) or (orphans and row["orphan"])]
    output.rows(_shown(output, rows), _HOLDINGS)


@command.command("check")
@with_output
@configured
@located
@_asked
def check(
    output: Output, config: Config, *, states: tuple[str, ...], proc: str, pod_resources: str
) -> None:
    r"""Find what should not be: exit status 3 if a holding is stale or an orphan, or missing.

    What the kubelet has given and nobody holds is listed too. It is a fault if the container runs
    without it; until then, as long as its image is not there, so it is with every pod. And
    processes on a GPU that are in no container are listed, and what containers of pods asked for
    and were not given.

    \b
    Keys of -o json: holdings (the stale and the orphans, as of `list`), unheld (each with
    namespace, pod, container, resource, device; pid and pod_uid of the container that runs without
    it, 0 and "" if none does), denied (each with namespace, pod, pod_uid, container, why), foreign
    (each with pid, name, devices; null if NVML does not say), unknown (why containers could not be
    read).
    """
    found = _look(config, states, proc, pod_resources, foreign=True)
    found["holdings"] = [row for row in found["holdings"] if row["stale"] or row["orphan"]]
    if output.form is not Format.TABLE:
        output.document(found)
    else:
        for rows, columns in (
            (_shown(output, found["holdings"]), _HOLDINGS),
            ([_shown_unheld(row) for row in found["unheld"]], _UNHELD),
            (found["foreign"] or (), _FOREIGN),
        ):
            if rows:
                output.rows(rows, columns)
        for row in found["denied"]:
            title = f"{row['namespace']}/{row['pod']}/{row['container']}"
            click.echo(printable(f"{title} was not given {row['why']}"))
        for line in found["unknown"]:
            click.echo(printable(line), err=True)
    if found["holdings"] or any(row["pid"] for row in found["unheld"]):
        click.get_current_context().exit(exits.FOUND)


@command.command("claims")
@with_output
@configured
def claims(output: Output, config: Config) -> None:
    r"""List the claims by which [sharing] limits who may have a device.

    \b
    Keys of -o json, of each: claim, container, bundle, devices, dead (its container has ended, or
    is gone: it counts no more).
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


def _look(
    config: Config,
    states: Sequence[str],
    proc: str,
    pod_resources: str,
    *,
    foreign: bool = False,
) -> dict[str, Any]:
    ledger, _ = anyio.run(ask, config, states, proc, pod_resources)
    found = as_document(ledger)
    if foreign:
        found["foreign"] = anyio.run(foreign_rows, config, states, proc)
    return found


def _shown(output: Output, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    if output.form is not Format.TABLE:
        return list(rows)
    return [
        {
            **row,
            "shown_title": title_of(row),
            "shown_wrong": "; ".join(filter(None, (row["stale"], row["orphan"]))),
        }
        for row in rows
    ]


def _shown_unheld(row: Mapping[str, Any]) -> Mapping[str, Any]:
    title = plain(f"{row['namespace']}/{row['pod']}/{row['container']}")
    missing = f"process {row['pid']}" if row["pid"] else ""
    return {**row, "shown_title": title, "shown_missing": missing}
