"""``nvshim ps``: running shims and fork servers, or the containers that hold GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import click

from api.errors import NvshimError
from hooks.config import load_config
from integration.cli.options import holding, located, with_listing
from integration.cli.output import Column, Output, by_index, plain, short_id, title_of
from integration.inspection.shim_list import list_shims

_STARTS: Final = {True: "warm", False: "cold", None: "-"}


def _kind(row: Mapping[str, Any]) -> str:
    notes = [
        f"user {row['uid']}" if row["uid"] else "",
        "left" if row["kind"] == "shim" and row["bundle"] is None else "",
        "old" if row["current"] is False else "",
    ]
    text = ", ".join(filter(None, notes))
    return f"{row['kind']} ({text})" if text else row["kind"]


def _what(row: Mapping[str, Any]) -> str:
    if row["pod"] is not None:
        return f"{row['pod']['namespace']}/{row['pod']['name']}"
    return plain(short_id(row["id"]))


def _name(row: Mapping[str, Any]) -> Any:
    if row["pod"] is not None:
        return _what(row)
    return f"{row['namespace']}/{row['id']}" if row["id"] else row["pid"]


def _containers(row: Mapping[str, Any]) -> list[Any]:
    if row["pod"]:
        return [each["name"] or short_id(each["id"]) for each in row["containers"]]
    return [title_of(each) for each in row["containers"]]


def _causes(row: Mapping[str, Any]) -> list[str]:
    return [each["cause"] for each in row["containers"] if each["cause"]]


def _memory(value: Mapping[str, int] | None) -> str:
    return "-" if value is None else f"{value['pss_bytes'] / (1 << 20):.1f} MiB"


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


_COLUMNS: Final = (
    Column("PID", "pid", right=True),
    Column("KIND", _kind),
    Column("NAMESPACE", "namespace", wide=True),
    Column("POD OR ID", _what),
    Column("CONTAINERS", _containers),
    Column("GPUS", lambda row: by_index(row["gpus"], row["gpu_indexes"])),
    Column("GPU UUIDS", "gpus", wide=True),
    Column("MEMORY", "memory", _memory, right=True),
    Column("VERSION", lambda row: row["version"] or row["tree"], wide=True),
    Column("START", "warm", lambda warm: _STARTS[warm], wide=True),
    Column("AGE", "age_seconds", _age, right=True),
    Column("CAUSE OF END", _causes, wide=True),
)


@click.command("ps")
@with_listing
@click.option(
    "--config", "config_path", metavar="FILE", type=click.Path(dir_okay=False),
    help="Use this configuration file instead of the node's. Without a readable configuration, GPUs"
    " are known only from the shims' records.",
)  # fmt: skip
@located
@click.option(
    "--gpus", is_flag=True,
    help="List the containers that hold a GPU instead, from their creation until they exit.",
)  # fmt: skip
@holding
def command(
    output: Output,
    *,
    config_path: str | None,
    states: tuple[str, ...],
    proc: str,
    gpus: bool,
    stale: bool,
    orphans: bool,
    pod_resources: str,
) -> None:
    r"""List the running shims, the fork servers, and their pre-forked spares.

    Processes are identified by the files they hold, not by their names. MEMORY is the proportional
    share (PSS). An "old" shim runs another version than the installed one, until its pod ends. A
    "left" shim has outlived its bundle.

    \b
    nvshim ps -o wide       with versions and UUIDs
    nvshim ps --gpus        containers that hold a GPU, and what is wrong with them
    """
    if gpus or stale or orphans:
        from integration.cli.ledger import show_holdings  # noqa: PLC0415 - imports gRPC

        show_holdings(
            output, load_config(config_path), (states, proc, pod_resources),
            stale=stale, orphans=orphans,
        )  # fmt: skip
        return
    try:
        config = load_config(config_path)
    except NvshimError as error:
        config = None
        click.echo(str(error), err=True)
    output.rows(list_shims(states, proc, config), _COLUMNS, name=_name)
