"""``nvidia-ctk cdi``: specs generated, listed, moved to another root."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import click

from integration.compat.gocli import GoGroup, Several

if TYPE_CHECKING:
    from integration.cli.nvidia_ctk.given import Given

__all__ = ["command"]

_MODES: Final = (
    "auto", "nvml", "management", "gds", "mofed", "gdrcopy", "nvswitch", "imex", "csv", "wsl",
)  # fmt: skip


@click.group("cdi", cls=GoGroup)
def command() -> None:
    """Provide tools for interacting with Container Device Interface specifications."""


_OTHERS: Final = {
    "--config-search-path": "config_search_paths",
    "--library-search-path": "library_search_paths",
    "--nvidia-cdi-hook-path": "hook_path",
    "--ldconfig-path": "ldconfig_path",
    "--disable-hook": "disabled_hooks",
    "--enable-hook": "enabled_hooks",
    "--csv.file": "csv_files",
    "--csv.ignore-pattern": "csv_patterns",
    "--csv.compat-container-root": "csv_root",
}
"""Flags of which only matters whether they are given."""


@command.command("generate")
@click.option(
    "--output",
    default="",
    envvar="NVIDIA_CTK_CDI_OUTPUT_FILE_PATH",
    metavar="FILE",
    help="The file; by default stdout.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["yaml", "json"], case_sensitive=False),
    envvar="NVIDIA_CTK_CDI_GENERATE_OUTPUT_FORMAT",
    help="By default by the file's name, else yaml.",
)
@click.option(
    "--mode",
    "--discovery-mode",
    default="auto",
    envvar="NVIDIA_CTK_CDI_GENERATE_MODE",
    type=click.Choice(_MODES, case_sensitive=False),
    help="What to describe.",
)
@click.option(
    "--driver-root",
    default="",
    envvar="NVIDIA_CTK_DRIVER_ROOT",
    metavar="PATH",
    help="Where the driver is.",
)
@click.option(
    "--dev-root", default="", envvar="NVIDIA_CTK_DEV_ROOT", metavar="PATH", help="Where dev is."
)
@click.option(
    "--device-name-strategy",
    "strategies",
    cls=Several,
    metavar="STRATEGY",
    envvar="NVIDIA_CTK_CDI_GENERATE_DEVICE_NAME_STRATEGIES",
    help="How GPUs are named: index, uuid, type-index.",
)
@click.option(
    "--vendor",
    "--cdi-vendor",
    default="",
    envvar="NVIDIA_CTK_CDI_GENERATE_VENDOR",
    help="In place of nvidia.com.",
)
@click.option(
    "--class",
    "--cdi-class",
    "class_",
    default="",
    envvar="NVIDIA_CTK_CDI_GENERATE_CLASS",
    help="In place of the mode's own.",
)
@click.option(
    "--no-all-device",
    is_flag=True,
    envvar="NVIDIA_CTK_CDI_GENERATE_NO_ALL_DEVICE",
    help="No device all.",
)
@click.option(
    "--device-id",
    "--device-ids",
    "--device",
    "--devices",
    "devices",
    cls=Several,
    envvar="NVIDIA_CTK_CDI_GENERATE_DEVICE_IDS",
    metavar="ID",
    help="Only these GPUs and MIG devices.",
)
@click.option(
    "--feature-flag",
    "--feature-flags",
    "features",
    cls=Several,
    envvar="NVIDIA_CTK_CDI_GENERATE_FEATURE_FLAGS",
    metavar="FLAG",
    help="no-additional-gids-for-device-nodes.",
)
@click.option(
    "--config-search-path",
    "config_search_paths",
    cls=Several,
    envvar="NVIDIA_CTK_CDI_GENERATE_CONFIG_SEARCH_PATHS",
    help="Changes nothing.",
)
@click.option(
    "--library-search-path",
    "library_search_paths",
    cls=Several,
    envvar="NVIDIA_CTK_CDI_GENERATE_LIBRARY_SEARCH_PATHS",
    help="Changes nothing.",
)
@click.option(
    "--nvidia-cdi-hook-path",
    "--nvidia-ctk-path",
    "hook_path",
    default="",
    envvar="NVIDIA_CTK_CDI_HOOK_PATH",
    help="Changes nothing.",
)
@click.option(
    "--ldconfig-path",
    default="",
    envvar="NVIDIA_CTK_CDI_GENERATE_LDCONFIG_PATH",
    help="Changes nothing.",
)
@click.option(
    "--disable-hook",
    "--disable-hooks",
    "disabled_hooks",
    cls=Several,
    envvar="NVIDIA_CTK_CDI_GENERATE_DISABLED_HOOKS",
    help="Changes nothing.",
)
@click.option(
    "--enable-hook",
    "--enable-hooks",
    "enabled_hooks",
    cls=Several,
    envvar="NVIDIA_CTK_CDI_GENERATE_ENABLED_HOOKS",
    help="An error.",
)
@click.option(
    "--csv.file",
    "csv_files",
    cls=Several,
    envvar="NVIDIA_CTK_CDI_GENERATE_CSV_FILES",
    help="An error.",
)
@click.option(
    "--csv.ignore-pattern",
    "csv_patterns",
    cls=Several,
    envvar="NVIDIA_CTK_CDI_GENERATE_CSV_IGNORE_PATTERNS",
    help="An error.",
)
@click.option(
    "--csv.compat-container-root",
    "csv_root",
    default="",
    envvar="NVIDIA_CTK_CDI_GENERATE_CSV_COMPAT_CONTAINER_ROOT",
    help="An error.",
)
@click.pass_obj
def generate(given: Given, /, **flags: Any) -> None:
    """Generate CDI specifications for use with CDI-enabled runtimes."""
    from hooks.cdi import generating, schema  # noqa: PLC0415 - after the options have been read
    from integration.cdi import writing  # noqa: PLC0415
    from integration.compat.cdi_generate import wish_of  # noqa: PLC0415
    from integration.inventory import inventory_of  # noqa: PLC0415

    output, form = flags.pop("output"), flags.pop("form")
    roots = flags.pop("driver_root"), flags.pop("dev_root")
    others = frozenset(flag for flag, name in _OTHERS.items() if flags.pop(name))
    wish, notes = wish_of(**flags, others=others)
    for note in notes:
        given.stderr.warning(note)
    config = given.config(*roots)
    spec = generating.generate(wish, inventory_of(config), config)
    text = writing.text_of(schema.to_tree(spec), form or writing.format_of(output))
    given.stderr.info(f"Generated CDI spec with version {spec.version}")
    _put(text, output)


def _put(text: str, output: str) -> None:
    from integration.cdi import writing  # noqa: PLC0415 - as above

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
    from hooks.cdi.registry import Registry  # noqa: PLC0415 - after the options have been read
    from integration.cdi.listing import CONFLICT, USED, list_devices  # noqa: PLC0415

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
    from hooks.cdi import schema  # noqa: PLC0415 - after the options have been read
    from integration.cdi import transforming, writing  # noqa: PLC0415

    spec = transforming.transform_root(transforming.read_spec(source), **roots)
    _put(writing.text_of(schema.to_tree(spec), writing.format_of(output)), output)
