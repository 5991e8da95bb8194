"""``nvshim explain``: why a container has what it has, or what it would be given."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

import click

from integration.cli.options import configured, located, with_output
from integration.inspection import explaining
from integration.inspection.errors import StateUnreadable
from integration.inspection.processes import all_containers

if TYPE_CHECKING:
    from hooks.config import Config
    from integration.cli.output import Output

__all__ = ["command"]

_PLAIN: Final = re.compile(r"[\w.:/@+-]+", re.ASCII)


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The ids of running containers, and their names in pods."""
    del param
    try:
        found = all_containers(ctx.params.get("states") or ())
    except StateUnreadable:
        return []
    words = [word for c in found if not c.sandbox for word in (c.id, c.title)]
    known = [word for word in dict.fromkeys(words) if word.startswith(incomplete)]
    # A shell takes what it is given for what was typed: no name may be a command.
    return [word for word in known if _PLAIN.fullmatch(word)]


@click.command("explain")
@with_output
@configured
@located
@click.argument("what", metavar="CONTAINER|CONFIG_JSON", shell_complete=_complete)
@click.option(
    "--rootfs",
    type=click.Path(file_okay=False),
    help="The image's root, for a CONFIG_JSON; by default that of the spec.",
)
@click.option("--diff/--no-diff", default=True, show_default=True,
              help="Tell what differs in the spec.")  # fmt: skip
def command(
    output: Output,
    config: Config,
    what: str,
    *,
    states: tuple[str, ...],
    proc: str,
    rootfs: str | None,
    diff: bool,
) -> None:
    r"""Tell why a container has what it has, or what it would be given.

    CONTAINER is the id of one that runs, or the beginning of it, or POD, POD/CONTAINER or
    NAMESPACE/POD/CONTAINER of Kubernetes. CONFIG_JSON is the spec of a bundle, or - for stdin:
    nothing of it is run.

    \b
    Keys of -o json: container, record (what nvidia.json of its bundle has), given (what it has by
    another than the shim: devices, nodes, unknown), nothing (why nothing was injected),
    differences (each with path, kind, before, after), notes, configuration.
    """
    # A file beside which one stands may be called as a container is.
    is_path = os.sep in what and os.path.isfile(what)
    if what == "-" or is_path or what.endswith(".json"):
        spec = explaining.read_spec(what)
        explanation = explaining.explain_spec(
            spec,
            config,
            rootfs=rootfs or explaining.rootfs_of(spec, what),
            beside="" if what == "-" else os.path.dirname(os.path.abspath(what)),
        )
    else:
        if rootfs is not None:
            raise click.UsageError("--rootfs is for a CONFIG_JSON: a running container has its own")
        container = explaining.find_container(what, all_containers(states, proc))
        explanation = explaining.explain_container(container, config)
    output.text(explanation.tell(diff=diff), explanation.to_json(diff=diff))
