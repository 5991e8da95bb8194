"""``nvshim ps``: the shims that run, and the processes that fork them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from api.errors import NvshimError
from hooks.config import load_config
from integration.cli.options import located, with_output
from integration.cli.output import Column, Format, Output, plain, title_of
from integration.inspection.processes import list_processes

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["command"]

_STARTS: Final = {True: "warm", False: "cold", None: "-"}


def _kind(row: Mapping[str, Any]) -> str:
    whose = f" (user {row['uid']})" if row["uid"] else ""
    left = " (left)" if row["kind"] == "shim" and row["bundle"] is None else ""
    return f"{row['kind']}{whose}{left}"


def _what(row: Mapping[str, Any]) -> str:
    if row["pod"] is not None:
        return f"{row['pod']['namespace']}/{row['pod']['name']}"
    return plain(row["id"])


def _version(row: Mapping[str, Any]) -> str:
    told = row["version"] or row["tree"]
    return plain(told) + (" (old)" if row["current"] is False else "")


def _memory(value: Mapping[str, int] | None) -> str:
    return "-" if value is None else f"{value['pss_bytes'] / (1 << 20):.1f} MiB"


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


_COLUMNS: Final = (
    Column("PID", "pid", right=True),
    Column("KIND", "shown_kind"),
    Column("NAMESPACE", "namespace"),
    Column("POD OR ID", "shown_what"),
    Column("CONTAINERS", "shown_containers"),
    Column("GPUS", "gpus"),
    Column("MEMORY", "memory", _memory, right=True),
    Column("VERSION", "shown_version"),
    Column("START", "warm", lambda warm: _STARTS[warm]),
    Column("AGE", "age_seconds", _age, right=True),
)


@click.command("ps")
@with_output
@click.option(
    "--config", "config_path", metavar="FILE", type=click.Path(dir_okay=False),
    help="The configuration; by default that of this node. Without one that can be read, records"
    " alone tell who has which GPU.",
)  # fmt: skip
@located
def command(output: Output, *, config_path: str | None, states: tuple[str, ...], proc: str) -> None:
    r"""List the running shims, the fork servers, and the spares that these keep.

    A process is listed for what it holds and not for its name, so nothing else is, whatever it
    calls itself. MEMORY is its part of the memory that it shares with others (PSS). A VERSION that
    is old is another than the installed one: its shim goes on until its pod ends.

    \b
    Keys of -o json, of each: pid, kind (shim, fork-server, spare), uid, namespace, id, pod,
    containers (each with id, namespace, pod, name, sandbox, pid, gpus), gpus, memory (pss_bytes,
    uss_bytes), version, tree, current, warm, age_seconds, containerd, socket,
    bundle (null of a shim that has outlived it).
    """
    try:
        config = load_config(config_path)
    except NvshimError as error:
        config = None
        click.echo(str(error), err=True)
    rows = list_processes(states, proc, config)
    if output.form is Format.TABLE:
        rows = [
            {
                **row,
                "shown_kind": _kind(row),
                "shown_what": _what(row),
                "shown_version": _version(row),
                "shown_containers": [
                    container["name"] or container["id"] for container in row["containers"]
                ]
                if row["pod"]
                else [title_of(container) for container in row["containers"]],
            }
            for row in rows
        ]
    output.rows(rows, _COLUMNS)
