"""``nvidia-ctk cdi``: generate, list and transform CDI specs."""

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
from integration.cli.nvidia_ctk.global_flags import GlobalFlags
from integration.compat.cdi_generate import MODES, OTHERS, generator_request
from integration.compat.gocli import GoGroup, Several
from integration.engines import podman
from integration.nvml.inventory import inventory_of


@click.group("cdi", cls=GoGroup)
def command() -> None:
    """Provide tools for interacting with Container Device Interface specifications."""


def _other_flags(function: Callable[..., None]) -> Callable[..., None]:
    """Add the flags that are ignored with a note, or refused."""
    for other in reversed(OTHERS):
        kind: dict[str, Any] = {"cls": Several} if other.several else {"default": ""}
        effect = "Not supported." if other.refused else "Has no effect."
        names = (*other.names, other.parameter)
        function = click.option(*names, envvar=other.envvar, help=effect, **kind)(function)
    return function


@command.command("generate")
@click.option("--output", default="", envvar="NVIDIA_CTK_CDI_OUTPUT_FILE_PATH", metavar="FILE",
              help="Write this file; by default stdout.")  # fmt: skip
@click.option("--format", "form", type=click.Choice(["yaml", "json"], case_sensitive=False),
              envvar="NVIDIA_CTK_CDI_GENERATE_OUTPUT_FORMAT",
              help="The format; by default from the file's name, else yaml.")  # fmt: skip
@click.option("--mode", "--discovery-mode", default="auto", envvar="NVIDIA_CTK_CDI_GENERATE_MODE",
              type=click.Choice(MODES, case_sensitive=False),
              help="The kind of devices to describe.")  # fmt: skip
@click.option("--driver-root", default="", envvar="NVIDIA_CTK_DRIVER_ROOT", metavar="PATH",
              help="The driver root.")  # fmt: skip
@click.option("--dev-root", default="", envvar="NVIDIA_CTK_DEV_ROOT", metavar="PATH",
              help="The directory that contains dev.")  # fmt: skip
@click.option("--device-name-strategy", "strategies", cls=Several, metavar="STRATEGY",
              envvar="NVIDIA_CTK_CDI_GENERATE_DEVICE_NAME_STRATEGIES",
              help="Identify devices by index, uuid or type-index.")  # fmt: skip
@click.option("--vendor", "--cdi-vendor", default="", envvar="NVIDIA_CTK_CDI_GENERATE_VENDOR",
              help="Use this vendor instead of nvidia.com.")  # fmt: skip
@click.option("--class", "--cdi-class", "class_", default="",
              envvar="NVIDIA_CTK_CDI_GENERATE_CLASS",
              help="Use this class instead of the mode's default.")  # fmt: skip
@click.option("--no-all-device", is_flag=True, envvar="NVIDIA_CTK_CDI_GENERATE_NO_ALL_DEVICE",
              help="Leave out the device all.")  # fmt: skip
@click.option("--device-id", "--device-ids", "--device", "--devices", "devices", cls=Several,
              envvar="NVIDIA_CTK_CDI_GENERATE_DEVICE_IDS", metavar="ID",
              help="Include only these GPUs and MIG devices.")  # fmt: skip
@click.option("--feature-flag", "--feature-flags", "features", cls=Several, metavar="FLAG",
              envvar="NVIDIA_CTK_CDI_GENERATE_FEATURE_FLAGS",
              help="no-additional-gids-for-device-nodes.")  # fmt: skip
@_other_flags
@click.pass_obj
def generate(global_flags: GlobalFlags, /, **flags: Any) -> None:
    """Generate CDI specifications for use with CDI-enabled runtimes."""
    output, form = flags.pop("output"), flags.pop("form")
    roots = flags.pop("driver_root"), flags.pop("dev_root")
    others = frozenset(other.names[0] for other in OTHERS if flags.pop(other.parameter))
    request, notes = generator_request(**flags, others=others)
    for note in notes:
        global_flags.stderr.warning(note)
    if request.groups and (old := podman.too_old()):
        request = replace(request, groups=False)
        global_flags.stderr.warning(podman.note_on(old))
    config = global_flags.config(*roots)
    spec = generating.generate(request, inventory_of(config), config)
    text = writing.text_of(schema.to_tree(spec), form or writing.format_of(output))
    global_flags.stderr.info(f"Generated CDI spec with version {spec.version}")
    _put(text, output)


def _put(text: str, output: str) -> None:
    if output:
        writing.write(output, text)
    else:
        sys.stdout.write(text)


@command.command("list")
@click.option("--spec-dir", "directories", cls=Several, envvar="NVIDIA_CTK_CDI_SPEC_DIRS",
              metavar="PATH", help="Read specs from these directories instead of the "
              "configuration's.")  # fmt: skip
@click.pass_obj
def list_(global_flags: GlobalFlags, directories: tuple[str, ...]) -> None:
    """List the available CDI devices."""
    registry = Registry.of(directories or global_flags.config().cdi_spec_dirs)
    rows = list_devices(registry)
    conflicts = [row for row in rows if row["state"] == CONFLICT]
    if registry.faults or conflicts:
        global_flags.stderr.warning("The following registry errors were reported:")
    for fault in registry.faults:
        global_flags.stderr.warning(f"{fault.path}: {fault.error.found}")
    for row in conflicts:
        global_flags.stderr.warning(f"{row['file']}: conflicting device {row['name']}")
    names = sorted(row["name"] for row in rows if row["state"] == USED)
    global_flags.stderr.info(f"Found {len(names)} CDI devices")
    sys.stdout.write("".join(f"{name}\n" for name in names))


@command.group("transform")
def transform() -> None:
    """Apply a transform to a CDI specification."""


@transform.command("root")
@click.option("--from", "old", default="", metavar="ROOT", help="The root to replace.")
@click.option("--to", "new", default="", metavar="ROOT", help="The new root.")
@click.option("--input", "source", default="-", metavar="FILE", help="Read this spec; - for stdin.")
@click.option("--output", default="", metavar="FILE", help="Write this file; by default stdout.")
@click.option("--relative-to", type=click.Choice(["host", "container"]), default="host",
              help="Change host paths or container paths.")  # fmt: skip
def root(*, source: str, output: str, **roots: str) -> None:
    """Apply a root transform to a CDI specification."""
    spec = transforming.transform_root(transforming.read_spec(source), **roots)
    _put(writing.text_of(schema.to_tree(spec), writing.format_of(output)), output)
