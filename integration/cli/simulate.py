"""``nvshim simulate``: a simulated GPU node in a directory, for tests."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import click

from integration.cli.options import DirectoryPath, completing, stacked, with_listing, with_output
from integration.cli.output import Column, Format, Output, plain
from integration.cli.progress import Progress
from integration.simulated.errors import ScenarioInvalid
from integration.simulated.layouts import Layout
from integration.simulated.node import SimulatedNode
from integration.simulated.scenario import Scenario
from integration.simulated.smoke_test import run as run_smoke_test
from integration.simulated.store import (
    STORE,
    describe,
    node_directory,
    remove_node,
    shipped_scenarios,
    stored_nodes,
    summary_of,
)


@click.group("simulate")
def command() -> None:
    """Create simulated GPU nodes, and run containers on them.

    A simulated node is a directory with NVIDIA's user-space driver, device nodes, the procfs and
    sysfs trees of a GPU node, and an NVML library that reports GPUs that do not exist.
    """


def _name(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse a name that is the directory of nodes itself, or the one above."""
    if value in {"", os.curdir, os.pardir}:
        raise click.BadParameter(f"{value!r} is not a name; a path has a slash.", ctx, param)
    return value


_store_option = click.option(
    "--in", "store", metavar="DIR", default=STORE, show_default=True,
    type=DirectoryPath(),
    help="The directory of nodes that have a NAME instead of a path.",
)  # fmt: skip


@completing
def _nodes(given: Mapping[str, Any]) -> list[str]:
    return [node.directory.rpartition("/")[2] for node in stored_nodes(given.get("store") or STORE)]


_made_of = stacked(
    click.option("--scenario", shell_complete=completing(lambda _: shipped_scenarios()),
                 help="A scenario file, or a name from `nvshim simulate scenarios`."),
    click.option("--gpus", type=int, help="The number of GPUs, without a scenario.  [default: 1]"),
    click.option("--model", help="The GPUs' model, without a scenario.  [default: h100]"),
    click.option("--driver", help="The driver's version; by default the packages' version."),
    click.option("--no-drm", is_flag=True, help="Leave out /dev/dri."),
)  # fmt: skip


def _scenario(*, scenario: str | None, no_drm: bool, **options: Any) -> Scenario:
    table = {key: value for key, value in options.items() if value is not None}
    table |= {"drm": False} if no_drm else {}
    if scenario is None:
        return Scenario.parse(table)
    if table:
        raise ScenarioInvalid(
            f"to create a node from the scenario {scenario}",
            found=f"it cannot be combined with {', '.join(table)}",
            do="set these in the scenario file",
        )
    return Scenario.load(scenario)


@command.command("create")
@with_output
@_store_option
@click.argument("name", callback=_name)
@_made_of
@click.option(
    "--layout", default="installer", show_default=True, help="The layout of the driver's files."
)
@click.option("--cache", type=DirectoryPath(),
              help="The cache directory of the driver's packages.")  # fmt: skip
def create(
    output: Output, *, store: str, name: str, layout: str, cache: str | None, **made_of: Any
) -> None:
    r"""Create a node, and show how to use it.

    NAME with a slash is a path; the directory must not exist, or be empty.
    """
    known = [each.value for each in Layout]
    if layout not in known:
        raise click.BadParameter(
            f"{layout!r} is not one of {', '.join(known)}", param_hint="--layout"
        )
    started = time.monotonic()
    with Progress(output) as progress:
        node = SimulatedNode.create(
            node_directory(name, store),
            _scenario(**made_of),
            packages_cache=cache,
            layout=Layout(layout),
            say=progress.update,
        )
    found = {**describe(node), "seconds": round(time.monotonic() - started, 2)}
    output.text("\n".join([*_description(found), "", *_usage(found)]), found)


@command.command("show")
@with_output
@_store_option
@click.argument("name", callback=_name, shell_complete=_nodes)
def show(output: Output, store: str, name: str) -> None:
    """Describe a node."""
    found = describe(SimulatedNode.open(node_directory(name, store)))
    output.text("\n".join(_description(found)), found)


@command.command("list")
@with_listing
@_store_option
def list_nodes(output: Output, store: str) -> None:
    """List the nodes that have names."""
    nodes = {node.directory: node for node in stored_nodes(store)}
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
    """List the included scenarios."""
    rows = [{"name": name, "what": what} for name, what in shipped_scenarios().items()]
    output.rows(rows, (Column("NAME", "name"), Column("WHAT", "what")))


@command.command("remove")
@_store_option
@click.argument("name", callback=_name, shell_complete=_nodes)
def remove(store: str, name: str) -> None:
    """Remove a node and its directory."""
    remove_node(name, store)


@command.command("run", context_settings={"ignore_unknown_options": True})
@_store_option
@click.option(
    "--node",
    metavar="NAME",
    callback=_name,
    shell_complete=_nodes,
    help="Use this existing node; by default a temporary node is created.",
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
    store: str,
    node: str | None,
    devices: str,
    capabilities: str,
    words: tuple[str, ...],
    **made_of: Any,
) -> None:
    r"""Run COMMAND in a container on a node, with a private containerd.

    The image has glibc, a shell and common small programs; the driver's programs come from the
    node. Everything except the --node is removed at the end. The exit status is that of COMMAND.

    \b
    nvshim simulate run --scenario mig -- nvidia-smi -L
    """
    chosen = _scenario(**made_of)
    if node is not None and any(
        value is not None and value is not False for value in made_of.values()
    ):
        raise click.UsageError(
            "--node already has its GPUs; do not combine it with options of a new node."
        )
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(Output(Format.TABLE)))
        if node is not None:
            there = SimulatedNode.open(node_directory(node, store))
        else:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="nvshim-node-"))
            there = SimulatedNode.create(f"{directory}/node", chosen, say=progress.update)
        status = run_smoke_test(
            there.config_path,
            words,
            devices=devices,
            capabilities=capabilities,
            say=progress.update,
        )
    click.get_current_context().exit(status)


def _description(found: Mapping[str, Any]) -> Iterator[str]:
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
