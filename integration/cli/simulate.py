"""``nvshim simulate``: a GPU node in a directory, to try things on."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import click

from integration.cli.options import completing, stacked, with_listing, with_output
from integration.cli.output import Column, Format, Output, plain
from integration.cli.progress import Progress
from integration.simulated.errors import ScenarioInvalid
from integration.simulated.layouts import Layout
from integration.simulated.node import SimulatedNode
from integration.simulated.scenario import Scenario
from integration.simulated.shelf import (
    SHELF,
    describe,
    nodes_on,
    place_of,
    remove_node,
    shipped_scenarios,
    summary_of,
)
from integration.simulated.trying import run as run_on


@click.group("simulate")
def command() -> None:
    """Make simulated GPU nodes to try things on, and run containers on them.

    A node is a directory with NVIDIA's user-space driver, device nodes, procfs and sysfs trees as a
    node with GPUs has them, and an NVML library that tells of GPUs that are not there.
    """


_shelf = click.option(
    "--in", "shelf", metavar="DIR", default=SHELF, show_default=True,
    type=click.Path(file_okay=False), help="Where nodes are that have a NAME and no path.",
)  # fmt: skip


@completing
def _nodes(given: Mapping[str, Any]) -> list[str]:
    return [node.directory.rpartition("/")[2] for node in nodes_on(given.get("shelf") or SHELF)]


_made_of = stacked(
    click.option("--scenario", shell_complete=completing(lambda _: shipped_scenarios()),
                 help="A scenario file, or one of `nvshim simulate scenarios`."),
    click.option("--gpus", type=int, help="How many GPUs, instead of a scenario; 1."),
    click.option("--model", help="Which, instead of a scenario; h100."),
    click.option("--driver", help="The driver's version; by default that of the packages."),
    click.option("--no-drm", is_flag=True, help="Without /dev/dri."),
)  # fmt: skip


def _scenario(*, scenario: str | None, no_drm: bool, **asked: Any) -> Scenario:
    table = {key: value for key, value in asked.items() if value is not None}
    table |= {"drm": False} if no_drm else {}
    if scenario is None:
        return Scenario.parse(table)
    if table:
        raise ScenarioInvalid(
            f"a simulated node of the scenario {scenario}",
            found=f"{', '.join(table)} beside it",
            do="write that into the scenario file",
        )
    return Scenario.load(scenario)


@command.command("create")
@with_output
@_shelf
@click.argument("name")
@_made_of
@click.option(
    "--layout", default="installer", show_default=True, help="How the driver's files lie."
)
@click.option("--cache", type=click.Path(file_okay=False),
              help="Where the driver's packages are kept.")  # fmt: skip
def create(
    output: Output, *, shelf: str, name: str, layout: str, cache: str | None, **made_of: Any
) -> None:
    r"""Make a node, and say how to use it.

    NAME is a path, if there is a slash in it, of a directory that is not there or empty.
    """
    known = [each.value for each in Layout]
    if layout not in known:
        raise click.BadParameter(f"{layout!r} is none of {', '.join(known)}", param_hint="--layout")
    began = time.monotonic()
    with Progress(output) as progress:
        node = SimulatedNode.create(
            place_of(name, shelf),
            _scenario(**made_of),
            packages_cache=cache,
            layout=Layout(layout),
            say=progress.say,
        )
    found = {**describe(node), "seconds": round(time.monotonic() - began, 2)}
    output.text("\n".join([*_told(found), "", *_usage(found)]), found)


@command.command("show")
@with_output
@_shelf
@click.argument("name", shell_complete=_nodes)
def show(output: Output, shelf: str, name: str) -> None:
    """Say what a node has."""
    found = describe(SimulatedNode.open(place_of(name, shelf)))
    output.text("\n".join(_told(found)), found)


@command.command("list")
@with_listing
@_shelf
def list_nodes(output: Output, shelf: str) -> None:
    """List the nodes that have names."""
    nodes = {node.directory: node for node in nodes_on(shelf)}
    columns = (
        Column("NAME", lambda row: row["directory"].rpartition("/")[2]),
        Column("DRIVER", "driver"),
        Column("GPUS", lambda row: summary_of(nodes[row["directory"]].scenario)),
        Column("CONFIG", "config", wide=True),
    )
    output.rows([describe(node) for node in nodes.values()], columns)


@command.command("scenarios")
@with_listing
def scenarios(output: Output) -> None:
    """List the scenarios that are shipped."""
    rows = [{"name": name, "what": what} for name, what in shipped_scenarios().items()]
    output.rows(rows, (Column("NAME", "name"), Column("WHAT", "what")))


@command.command("remove")
@_shelf
@click.argument("name", shell_complete=_nodes)
def remove(shelf: str, name: str) -> None:
    """Remove a node and all that is in its directory."""
    remove_node(name, shelf)


@command.command("run", context_settings={"ignore_unknown_options": True})
@_shelf
@click.option(
    "--node",
    metavar="NAME",
    shell_complete=_nodes,
    help="A node that was made before; by default one that is made for this.",
)
@_made_of
@click.option("--devices", default="all", show_default=True, help="NVIDIA_VISIBLE_DEVICES.")
@click.option(
    "--capabilities",
    default="compute,utility",
    show_default=True,
    help="NVIDIA_DRIVER_CAPABILITIES.",
)
@click.argument("words", metavar="COMMAND...", nargs=-1, required=True,
                type=click.UNPROCESSED)  # fmt: skip
def run(
    *,
    shelf: str,
    node: str | None,
    devices: str,
    capabilities: str,
    words: tuple[str, ...],
    **made_of: Any,
) -> None:
    r"""Run COMMAND in a container on a node, through a containerd of its own.

    The image has glibc, a shell and the usual small programs; the driver's come from the node.
    Nothing is left but the --node. The status is that of COMMAND.

    \b
    nvshim simulate run --scenario mig -- nvidia-smi -L
    """
    chosen = _scenario(**made_of)
    if node is not None and any(made_of.values()):
        raise click.UsageError("--node has its GPUs already")
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(Output(Format.TABLE)))
        if node is not None:
            there = SimulatedNode.open(place_of(node, shelf))
        else:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="nvshim-node-"))
            there = SimulatedNode.create(f"{directory}/node", chosen, say=progress.say)
        status = run_on(
            there.config_path, words, devices=devices, capabilities=capabilities, say=progress.say
        )
    click.get_current_context().exit(status)


def _told(found: Mapping[str, Any]) -> Iterator[str]:
    what = f"driver {found['driver']}, CUDA {found['cuda']}" if found["driver"] else "no driver"
    yield f"{found['directory']}: {found['platform'] or what}"
    for gpu in found["gpus"]:
        mode = "" if gpu["mig"] is None else ", MIG mode"
        yield f"  GPU {gpu['index']}: {gpu['model']} ({gpu['uuid']}) at {gpu['pci']}{mode}"
        for device in gpu["mig"] or ():
            yield f"    MIG {device['name']} ({device['uuid']})"
    for other in found["others"]:
        yield f"  {other['entry']} at {plain(other['pci'])}"


def _usage(found: Mapping[str, Any]) -> Iterator[str]:
    name = found["directory"]
    yield "Use it:"
    yield f"  nvshim list --config {found['config']}"
    yield f"  nvshim simulate run --node {name} -- nvidia-smi -L"
    yield f"  NVSHIM_CONFIG={found['config']}   in the environment of a containerd"
    yield f"  nvshim simulate remove {name}"
