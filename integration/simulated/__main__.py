"""``python -m integration.simulated``: make, show and remove simulated nodes from a shell."""

from __future__ import annotations

import argparse
import os
import sys
import time

from api.errors import NvshimError
from integration.errors import ScenarioInvalid
from integration.simulated.catalogue import MODELS
from integration.simulated.layouts import Layout
from integration.simulated.node import SimulatedNode
from integration.simulated.scenario import SHIPPED, Scenario
from integration.simulated.vendors import entry_of


def main(arguments: list[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: what the shell was given; ``sys.argv`` if None.

    Returns:
        The exit status: 0, or 1 with one line on stderr that says why.
    """
    options = _parser().parse_args(arguments)
    try:
        {"create": _create, "show": _show, "remove": _remove}[options.command](options)
    except NvshimError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    shipped = ", ".join(sorted(f[:-5] for f in os.listdir(SHIPPED) if f.endswith(".toml")))
    parser = argparse.ArgumentParser(
        prog="python -m integration.simulated",
        description="A directory that looks like a node with GPUs, for a machine that has none.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    create = commands.add_parser("create", help="make a node", allow_abbrev=False)
    create.add_argument("directory", help="where; it must not exist, or be empty")
    create.add_argument("--scenario", help=f"a scenario file, or one of {shipped}")
    create.add_argument("--gpus", type=int, help="how many GPUs, instead of a scenario (1)")
    create.add_argument("--model", help=f"which, instead of a scenario: {', '.join(MODELS)}")
    create.add_argument("--driver", help="the driver's version; by default that of the packages")
    create.add_argument("--no-drm", action="store_true", help="without /dev/dri")
    layouts = [layout.value for layout in Layout]
    create.add_argument("--layout", choices=layouts, default=layouts[0], help="of driver files")
    create.add_argument("--cache", help="where the driver's packages are kept")
    show = commands.add_parser("show", help="say what a node has", allow_abbrev=False)
    show.add_argument("directory", help="where it is")
    remove = commands.add_parser("remove", help="remove a node", allow_abbrev=False)
    remove.add_argument("directory", help="where it is")
    return parser


def _create(options: argparse.Namespace) -> None:
    began = time.monotonic()
    asked = {"gpus": options.gpus, "model": options.model, "driver": options.driver}
    table = {key: value for key, value in asked.items() if value is not None}
    table |= {"drm": False} if options.no_drm else {}
    if options.scenario is None:
        scenario = Scenario.parse(table)
    elif not table:
        scenario = Scenario.load(options.scenario)
    else:
        raise ScenarioInvalid(
            f"a simulated node of the scenario {options.scenario}",
            found=f"{', '.join(table)} beside it",
            do="write that into the scenario file",
        )
    node = SimulatedNode.create(
        options.directory,
        scenario,
        packages_cache=options.cache,
        layout=Layout(options.layout),
        say=print,
    )
    _describe(node)
    print(f"made in {time.monotonic() - began:.1f} s; configuration: {node.config_path}")


def _show(options: argparse.Namespace) -> None:
    _describe(SimulatedNode.open(options.directory))


def _remove(options: argparse.Namespace) -> None:
    SimulatedNode.open(options.directory).remove()


def _describe(node: SimulatedNode) -> None:
    if node.scenario.nvidia:
        cuda = ".".join(map(str, node.scenario.cuda_version(node.driver_version)))
        print(f"{node.directory}: driver {node.driver_version}, CUDA {cuda}")
    else:
        what = node.scenario.platform or "without NVIDIA's driver"
        print(f"{node.directory}: {what}")
    for gpu in node.scenario.gpus:
        mode = "" if gpu.mig is None else ", MIG mode"
        print(f"  GPU {gpu.index}: {gpu.model.name} ({gpu.uuid}) at {gpu.pci}{mode}")
        for instance in gpu.mig or ():
            for compute in instance.compute:
                print(f"    MIG {instance.device_name(compute)} ({compute.uuid})")
    for other in node.scenario.others:
        print(f"  {entry_of(other)} at {other.pci}")


if __name__ == "__main__":
    sys.exit(main())
