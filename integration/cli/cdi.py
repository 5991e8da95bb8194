"""``nvshim cdi``: CDI specs, written, listed, checked and moved to another root."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import click

from api.errors import one_line
from hooks.cdi import generating, schema
from hooks.cdi.registry import Registry
from hooks.cdi.spec import SpecFile
from hooks.config import Config
from hooks.words import CAPABILITIES
from integration.cdi import checking, listing, transforming, writing
from integration.cli.options import configured, found_if, with_listing, with_output
from integration.cli.output import Column, Format, Output, counted
from integration.engines import podman
from integration.nvml.inventory import inventory_of


@click.group("cdi")
def command() -> None:
    """Write CDI specs of this node's GPUs; list, check and move specs of any vendor."""


def _absolute(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    del ctx
    for path in value if isinstance(value, tuple) else (value,):
        if path is not None and not path.startswith("/"):
            raise click.BadParameter(f"{path!r} is no absolute path", param=param)
    if isinstance(value, tuple):
        return tuple(map(os.path.normpath, value))
    return None if value is None else os.path.normpath(value)


def _pairs(
    ctx: click.Context, param: click.Parameter, value: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    del ctx
    for pair in value:
        if "=" not in pair:
            raise click.BadParameter(f"{pair!r} is not of the form KEY=VALUE", param=param)
    return tuple((key, text) for key, _, text in (pair.partition("=") for pair in value))


def _written(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command that makes a spec ``-o yaml|json`` and ``--to FILE``."""
    form = click.option(
        "-o", "--output", "form", type=click.Choice(["yaml", "json"]),
        help="How to write the spec; by default by the file's name, else YAML.",
    )  # fmt: skip
    return form(function)


def _write(spec: SpecFile, form: str | None, to: str | None) -> None:
    text = writing.text_of(schema.to_tree(spec), form or writing.format_of(to))
    if to is None or to == "-":
        sys.stdout.write(text)
        return
    writing.write(to, text)
    devices = counted(len(spec.devices), "device")
    sys.stderr.write(f"{to}: {devices} of {spec.kind}, CDI {spec.version}\n")


def _tell_errors_as(form: str | None) -> None:
    """A failure is a document if the answer was to be one."""
    if form is not None:
        click.get_current_context().find_root().meta["nvshim.format"] = Format(form)


@command.command("generate")
@configured
@_written
@click.option("-f", "--file", "--to", "to", metavar="FILE",
              help="The file to write, in one step; by default stdout.")  # fmt: skip
@click.option("--kind", type=click.Choice([str(kind) for kind in generating.KINDS]),
              default="gpu", show_default=True, help="What to describe.")  # fmt: skip
@click.option("--vendor", default="", help="In place of nvidia.com.")
@click.option("--class", "class_", default="", help="In place of the kind's own.")
@click.option("--device-name-strategy", "strategies", multiple=True,
              type=click.Choice(generating.STRATEGIES), help="How GPUs are named; "
              "may be repeated; by default index and uuid.")  # fmt: skip
@click.option("--device", "devices", multiple=True, metavar="ID",
              help="Only this GPU or MIG device: an index, a UUID, a PCI address, GPU:MIG; "
              "may be repeated.")  # fmt: skip
@click.option("--all-device/--no-all-device", default=True,
              help="Whether there is a device all, with whatever the others have.")  # fmt: skip
@click.option("--groups/--no-groups", default=None,
              help="Give a process the groups of nodes that are not everybody's, or not; by "
              "default yes, unless this node has a Podman before 5.1, which refuses such a "
              "spec.")  # fmt: skip
@click.option("--capability", "capabilities", multiple=True,
              type=click.Choice(sorted(CAPABILITIES)), help="Which of the driver's files; "
              "may be repeated; by default all but compat32.")  # fmt: skip
@click.option("--library-directory", "directories", multiple=True, callback=_absolute,
              metavar="PATH", help="Where libraries go; may be repeated; by default where loaders "
              "of common images search.")  # fmt: skip
@click.option("--annotation", "annotations", multiple=True, metavar="KEY=VALUE", callback=_pairs,
              help="Of the spec; may be repeated.")  # fmt: skip
@click.option("--driver-root", metavar="PATH", callback=_absolute,
              help="Where the driver's files are, in place of the configuration's.")  # fmt: skip
@click.option("--dev-root", metavar="PATH", callback=_absolute,
              help="The directory whose dev has the device nodes, in place of the "
              "configuration's.")  # fmt: skip
def generate(config: Config, form: str | None, to: str | None, **wish: Any) -> None:
    """Write a spec of this node's NVIDIA devices, without hooks."""
    _tell_errors_as(form)

    if root := wish.pop("driver_root"):
        config = replace(config, driver_root=root)
    if root := wish.pop("dev_root"):
        config = replace(config, dev=os.path.join(root, "dev"))
    strategies = tuple(dict.fromkeys(wish.pop("strategies"))) or ("index", "uuid")
    capabilities = frozenset(wish.pop("capabilities")) or generating.DEFAULT_CAPABILITIES
    groups = wish.pop("groups")
    if groups is None:
        old = podman.too_old()
        groups = not old
        if old:
            sys.stderr.write(f"{podman.note_on(old)} (--groups: write them all the same)\n")
    devices = [part.strip() for each in wish.pop("devices") for part in each.split(",")]
    wanted = generating.SpecOptions(
        strategies=strategies,
        capabilities=capabilities,
        devices=tuple(filter(None, devices)),
        groups=groups,
        **wish,
    )
    _write(generating.generate(wanted, inventory_of(config), config), form, to)


def _registry(directories: tuple[str, ...], config: Config) -> Registry:
    return Registry.of(directories or config.cdi_spec_dirs)


_SPEC_DIR: Final = click.option(
    "--spec-dir", "directories", multiple=True, callback=_absolute, metavar="PATH",
    help="A directory of specs, in place of the configuration's; may be repeated, the later wins.",
)  # fmt: skip


@command.command("list")
@with_listing
@configured
@_SPEC_DIR
def list_(output: Output, config: Config, directories: tuple[str, ...]) -> None:
    """Name the devices of all spec files, and which file counts for each."""
    registry = _registry(directories, config)
    rows, faults = listing.list_devices(registry), listing.list_faults(registry)
    columns = [Column("DEVICE", "name"), Column("STATE", "state"), Column("FILE", "file")]
    output.rows(rows, columns, faults=faults)
    for fault in registry.faults if not output.form.is_document else ():
        sys.stderr.write(f"{fault.error}\n")


@command.command("validate")
@with_output
@configured
@_SPEC_DIR
@click.argument("files", nargs=-1)
def validate(
    output: Output, config: Config, directories: tuple[str, ...], files: tuple[str, ...]
) -> None:
    """Say what is wrong with FILES, or with all spec files, and what of the host is gone.

    Ends with 3 if there is anything but warnings.
    """
    if files and directories:
        raise click.UsageError("name files or --spec-dir, not both")
    if files:
        checked = checking.check_files(files, config)
    else:
        checked = checking.check_registry(_registry(directories, config), config)
    output.text(
        "".join(_told(each) for each in checked),
        {"items": [_document(each) for each in checked]},
    )
    found_if(not all(each.is_good for each in checked))


def _told(checked: Any) -> str:
    good = f"valid, {counted(checked.devices, 'device')} of {checked.kind}, CDI {checked.version}"
    head = good if checked.is_good else counted(len(checked.findings), "finding")
    lines = [f"{checked.path}: {head}"]
    for finding in checked.findings:
        whose = f" (of {finding.device})" if finding.device not in {"", finding.subject} else ""
        subject = "" if finding.subject == checked.path else f"{finding.subject}: "
        text = f"{finding.weight}: {finding.what}: {subject}{finding.found}{whose}"
        lines.append(f"  {one_line(text)}")
    return "".join(f"{line}\n" for line in lines)


def _document(checked: Any) -> dict[str, Any]:
    return {
        "file": checked.path,
        "kind": checked.kind or None,
        "version": checked.version or None,
        "devices": checked.devices,
        "valid": checked.is_good,
        "findings": [
            {
                "what": finding.what,
                "weight": finding.weight,
                "device": finding.device or None,
                "subject": finding.subject,
                "found": finding.found,
            }
            for finding in checked.findings
        ],
    }


@command.group("transform")
def transform() -> None:
    """Make another spec of one."""


@transform.command("root")
@_written
@click.option("--input", "source", metavar="FILE", default="-", show_default=True,
              help="The spec; - for stdin.")  # fmt: skip
@click.option("-f", "--file", "--into", "into", metavar="FILE",
              help="The file to write, in one step; by default stdout. It may be that of "
              "--input.")  # fmt: skip
@click.option("--from", "old", metavar="ROOT", required=True, callback=_absolute,
              help="What paths begin with.")  # fmt: skip
@click.option("--to", "new", metavar="ROOT", default="/", show_default=True, callback=_absolute,
              help="What they are to begin with.")  # fmt: skip
@click.option("--relative-to", type=click.Choice(["host", "container"]), default="host",
              show_default=True, help="Whose paths are meant.")  # fmt: skip
def root(form: str | None, source: str, into: str | None, **roots: str) -> None:
    """Let paths begin with another root."""
    _tell_errors_as(form)

    spec = transforming.read_spec(source)
    _write(transforming.transform_root(spec, **roots), form, into)
