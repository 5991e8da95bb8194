"""``nvidia-ctk cdi``: specs generated, listed, moved to another root."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import click

from hooks.cdi import generating, schema
from hooks.cdi.registry import Registry
from integration.cdi import transforming, writing
from integration.cdi.listing import CONFLICT, USED, list_devices
from integration.cli.nvidia_ctk.given import Given
from integration.compat.cdi_generate import MODES, OTHERS, generator_request
from integration.compat.gocli import GoGroup, Several
from integration.engines import podman
from integration.nvml.inventory import inventory_of


@click.group("cdi", cls=GoGroup)
def command() -> None:
    """Provide tools for interacting with Container Device Interface specifications."""


def _others(function: Callable[..., None]) -> Callable[..., None]:
    """The flags of which only matters whether they are given."""
    for other in reversed(OTHERS):
        kind: dict[str, Any] = {"cls": Several} if other.several else {"default": ""}
        told = "An error." if other.refused else "Changes nothing."
        names = (*other.names, other.parameter)
        function = click.option(*names, envvar=other.envvar, help=told, **kind)(function)
    return function


@command.command("generate")
@click.option("--output", default="", envvar="NVIDIA_CTK_CDI_OUTPUT_FILE_PATH", metavar="FILE",
              help="The file; by default stdout.")  # fmt: skip
@click.option("--format", "form", type=click.Choice(["yaml", "json"], case_sensitive=False),
              envvar="NVIDIA_CTK_CDI_GENERATE_OUTPUT_FORMAT",
              help="By default by the file's name, else yaml.")  # fmt: skip
@click.option("--mode", "--discovery-mode", default="auto", envvar="NVIDIA_CTK_CDI_GENERATE_MODE",
              type=click.Choice(MODES, case_sensitive=False),
              help="What to describe.")  # fmt: skip
@click.option("--driver-root", default="", envvar="NVIDIA_CTK_DRIVER_ROOT", metavar="PATH",
              help="Where the driver is.")  # fmt: skip
@click.option("--dev-root", default="", envvar="NVIDIA_CTK_DEV_ROOT", metavar="PATH",
              help="Where dev is.")  # fmt: skip
@click.option("--device-name-strategy", "strategies", cls=Several, metavar="STRATEGY",
              envvar="NVIDIA_CTK_CDI_GENERATE_DEVICE_NAME_STRATEGIES",
              help="How GPUs are named: index, uuid, type-index.")  # fmt: skip
@click.option("--vendor", "--cdi-vendor", default="", envvar="NVIDIA_CTK_CDI_GENERATE_VENDOR",
              help="In place of nvidia.com.")  # fmt: skip
@click.option("--class", "--cdi-class", "class_", default="",
              envvar="NVIDIA_CTK_CDI_GENERATE_CLASS",
              help="In place of the mode's own.")  # fmt: skip
@click.option("--no-all-device", is_flag=True, envvar="NVIDIA_CTK_CDI_GENERATE_NO_ALL_DEVICE",
              help="No device all.")  # fmt: skip
@click.option("--device-id", "--device-ids", "--device", "--devices", "devices", cls=Several,
              envvar="NVIDIA_CTK_CDI_GENERATE_DEVICE_IDS", metavar="ID",
              help="Only these GPUs and MIG devices.")  # fmt: skip
@click.option("--feature-flag", "--feature-flags", "features", cls=Several, metavar="FLAG",
              envvar="NVIDIA_CTK_CDI_GENERATE_FEATURE_FLAGS",
              help="no-additional-gids-for-device-nodes.")  # fmt: skip
@_others
@click.pass_obj
def generate(given: Given, /, **flags: Any) -> None:
    """Generate CDI specifications for use with CDI-enabled runtimes."""
    output, form = flags.pop("output"), flags.pop("form")
    roots = flags.pop("driver_root"), flags.pop("dev_root")
    others = frozenset(other.names[0] for other in OTHERS if flags.pop(other.parameter))
    wish, notes = generator_request(**flags, others=others)
    for note in notes:
        given.stderr.warning(note)
    if wish.groups and (old := podman.too_old()):
        wish = replace(wish, groups=False)
        given.stderr.warning(podman.note_on(old))
    config = given.config(*roots)
    spec = generating.generate(wish, inventory_of(config), config)
    text = writing.text_of(schema.to_tree(spec), form or writing.format_of(output))
    given.stderr.info(f"Generated CDI spec with version {spec.version}")
    _put(text, output)


def _put(text: str, output: str) -> None:
    if output:
        writing.write(output, text)
    else:
        sys.stdout.write(text)


@command.command("list")
@click.option("--spec-dir", "directories", cls=Several, envvar="NVIDIA_CTK_CDI_SPEC_DIRS",
              metavar="PATH", help="Directories of specs, in place of the "
              "configuration's.")  # fmt: skip
@click.pass_obj
def list_(given: Given, directories: tuple[str, ...]) -> None:
    """List the available CDI devices."""
    registry = Registry.of(directories or given.config().cdi_spec_dirs)
    rows = list_devices(registry)
    conflicts = [row for row in rows if row["state"] == CONFLICT]
    if registry.faults or conflicts:
        given.stderr.warning("The following registry errors were reported:")
    for fault in registry.faults:
        given.stderr.warning(f"{fault.path}: {fault.error.found}")
    for row in conflicts:
        given.stderr.warning(f"{row['file']}: conflicting device {row['name']}")
    names = sorted(row["name"] for row in rows if row["state"] == USED)
    given.stderr.info(f"Found {len(names)} CDI devices")
    sys.stdout.write("".join(f"{name}\n" for name in names))


@command.group("transform")
def transform() -> None:
    """Apply a transform to a CDI specification."""


@transform.command("root")
@click.option("--from", "old", default="", metavar="ROOT", help="What paths begin with.")
@click.option("--to", "new", default="", metavar="ROOT", help="What they are to begin with.")
@click.option("--input", "source", default="-", metavar="FILE", help="The spec; - for stdin.")
@click.option("--output", default="", metavar="FILE", help="The file; by default stdout.")
@click.option("--relative-to", type=click.Choice(["host", "container"]), default="host",
              help="Whose paths are meant.")  # fmt: skip
def root(*, source: str, output: str, **roots: str) -> None:
    """Apply a root transform to a CDI specification."""
    spec = transforming.transform_root(transforming.read_spec(source), **roots)
    _put(writing.text_of(schema.to_tree(spec), writing.format_of(output)), output)
