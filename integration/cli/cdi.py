"""``nvshim cdi``: write, list, check and transform CDI specs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import click

from api.errors import one_line, printable
from hooks.cdi import generating, schema
from hooks.cdi.registry import Registry
from hooks.cdi.spec import SpecFile
from hooks.config import Config
from hooks.words import CAPABILITIES
from integration.cdi import checking, listing, transforming, writing
from integration.cli.options import choose_form, configured, found_if, with_listing, with_output
from integration.cli.output import Column, Output, best_effort, counted
from integration.engines import podman
from integration.nvml.inventory import inventory_of


@click.group("cdi")
def command() -> None:
    """Write CDI specs for this node's GPUs; list, check and transform specs of any vendor."""


def _absolute(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    del ctx
    for path in value if isinstance(value, tuple) else (value,):
        if path is not None and not path.startswith("/"):
            raise click.BadParameter(f"{path!r} is not an absolute path", param=param)
    if isinstance(value, tuple):
        return tuple(map(os.path.normpath, value))
    return None if value is None else os.path.normpath(value)


def _pairs(
    ctx: click.Context, param: click.Parameter, value: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    del ctx
    for pair in value:
        if "=" not in pair:
            raise click.BadParameter(f"{pair!r} is not KEY=VALUE", param=param)
    return tuple((key, text) for key, _, text in (pair.partition("=") for pair in value))


def _with_form(function: Callable[..., None]) -> Callable[..., None]:
    """Add ``-o yaml|json`` to a command that writes a spec."""
    form = click.option(
        "-o", "--output", "form", type=click.Choice(["yaml", "json"]),
        is_eager=True, callback=choose_form,
        help="The spec's format; by default from the file's name, else YAML.",
    )  # fmt: skip
    return form(function)


def _write(spec: SpecFile, form: str | None, to: str | None) -> None:
    text = writing.text_of(schema.to_tree(spec), form or writing.format_of(to))
    if to is None or to == "-":
        sys.stdout.write(text)
        return
    writing.write(to, text)
    devices = counted(len(spec.devices), "device")
    with best_effort():
        sys.stderr.write(f"{printable(to)}: {devices} of {spec.kind}, CDI {spec.version}\n")


@command.command("generate")
@configured
@_with_form
@click.option("-f", "--file", "--to", "to", metavar="FILE",
              help="Write this file atomically; by default stdout.")  # fmt: skip
@click.option("--kind", type=click.Choice([str(kind) for kind in generating.KINDS]),
              default="gpu", show_default=True, help="Describe devices of this kind.")  # fmt: skip
@click.option("--vendor", default="", help="Use this vendor instead of nvidia.com.")
@click.option("--class", "class_", default="", help="Use this class instead of the kind's default.")
@click.option("--device-name-strategy", "strategies", multiple=True,
              type=click.Choice(generating.STRATEGIES), help="Identify devices by this name; "
              "repeatable.  [default: index and uuid]")  # fmt: skip
@click.option("--device", "devices", multiple=True, metavar="ID",
              help="Include only this GPU or MIG device, by index, UUID, PCI address or GPU:MIG; "
              "repeatable.")  # fmt: skip
@click.option("--all-device/--no-all-device", default=True,
              help="Add a device named all with everything of the other devices.")  # fmt: skip
@click.option("--groups/--no-groups", default=None,
              help="Add the groups of device nodes that are not accessible to all users. On by "
              "default, unless this node has a Podman before 5.1, which rejects such "
              "specs.")  # fmt: skip
@click.option("--capability", "capabilities", multiple=True,
              type=click.Choice(sorted(CAPABILITIES)), help="Include the driver files of "
              "this capability; repeatable.  [default: all but compat32]")  # fmt: skip
@click.option("--library-directory", "directories", multiple=True, callback=_absolute,
              metavar="PATH", help="Mount libraries into this directory; repeatable.  [default: "
              "the search paths of common images]")  # fmt: skip
@click.option("--annotation", "annotations", multiple=True, metavar="KEY=VALUE", callback=_pairs,
              help="Add this annotation to the spec; repeatable.")  # fmt: skip
@click.option("--driver-root", metavar="PATH", callback=_absolute,
              help="Use this driver root instead of the configuration's.")  # fmt: skip
@click.option("--dev-root", metavar="PATH", callback=_absolute,
              help="Use the device nodes in dev below this directory instead of the "
              "configuration's.")  # fmt: skip
def generate(config: Config, form: str | None, to: str | None, **options: Any) -> None:
    """Write a CDI spec for this node's NVIDIA devices, without hooks."""
    if root := options.pop("driver_root"):
        config = replace(config, driver_root=root)
    if root := options.pop("dev_root"):
        config = replace(config, dev=os.path.join(root, "dev"))
    strategies = tuple(dict.fromkeys(options.pop("strategies"))) or ("index", "uuid")
    capabilities = frozenset(options.pop("capabilities")) or generating.DEFAULT_CAPABILITIES
    groups = options.pop("groups")
    if groups is None:
        old = podman.too_old()
        groups = not old
        if old:
            sys.stderr.write(f"{podman.note_on(old)} (use --groups to add them anyway)\n")
    named = options.pop("devices")
    devices = tuple(filter(None, (part.strip() for each in named for part in each.split(","))))
    if named and not devices:  # often an unset variable; without a name, every device is included
        raise click.BadParameter("It names no device.", param_hint="--device")
    request = generating.SpecOptions(
        strategies=strategies,
        capabilities=capabilities,
        devices=devices,
        groups=groups,
        **options,
    )
    _write(generating.generate(request, inventory_of(config), config), form, to)


def _registry(directories: tuple[str, ...], config: Config) -> Registry:
    return Registry.of(directories or config.cdi_spec_dirs)


_SPEC_DIR: Final = click.option(
    "--spec-dir", "directories", multiple=True, callback=_absolute, metavar="PATH",
    help="Read specs from this directory instead of the configuration's; repeatable, the last "
    "wins.",
)  # fmt: skip


@command.command("list")
@with_listing
@configured
@_SPEC_DIR
def list_(output: Output, config: Config, directories: tuple[str, ...]) -> None:
    """List the devices of all spec files, and the file that each one comes from."""
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
    """Check FILES, or all spec files, for errors and for host files that do not exist.

    The exit status is 3 if there are findings other than warnings.
    """
    if files and directories:
        raise click.UsageError("Name files or use --spec-dir, not both.")
    if files:
        checked = checking.check_files(files, config)
    else:
        checked = checking.check_registry(_registry(directories, config), config)
    output.text(
        "".join(_check_text(each) for each in checked),
        {"items": [_document(each) for each in checked]},
    )
    found_if(not all(each.is_good for each in checked))


def _check_text(checked: Any) -> str:
    good = f"valid, {counted(checked.devices, 'device')} of {checked.kind}, CDI {checked.version}"
    head = good if checked.is_good else counted(len(checked.findings), "finding")
    lines = [f"{checked.path}: {head}"]
    for finding in checked.findings:
        whose = f" (device {finding.device})" if finding.device not in {"", finding.subject} else ""
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
    """Change a spec."""


@transform.command("root")
@_with_form
@click.option("--input", "source", metavar="FILE", default="-", show_default=True,
              help="Read this spec; - for stdin.")  # fmt: skip
@click.option("-f", "--file", "--into", "into", metavar="FILE",
              help="Write this file atomically; by default stdout. It may be the same as "
              "--input.")  # fmt: skip
@click.option("--from", "old", metavar="ROOT", required=True, callback=_absolute,
              help="Replace this root at the start of paths.")  # fmt: skip
@click.option("--to", "new", metavar="ROOT", default="/", show_default=True, callback=_absolute,
              help="The new root.")  # fmt: skip
@click.option("--relative-to", type=click.Choice(["host", "container"]), default="host",
              show_default=True, help="Change host paths or container paths.")  # fmt: skip
def root(form: str | None, source: str, into: str | None, **roots: str) -> None:
    """Replace the root of a spec's paths."""
    spec = transforming.read_spec(source)
    _write(transforming.transform_root(spec, **roots), form, into)
