"""``nvshim config``: show, check and change the configuration."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

import click

from api.errors import NvshimError, printable
from hooks.config import TABLES
from hooks.errors import ConfigError
from integration import exits
from integration.cli.options import completing, found_if, stacked, with_listing, with_output
from integration.cli.output import Column, Output
from integration.inspection import settings
from integration.inspection.settings import Change, setting_names

_NAMES: Final = {"file": "file", "nvidia": "NVIDIA's file", "default": "default"}


@click.group("config")
def command() -> None:
    """Show, check and change this node's configuration."""


@completing
def _values(given: Mapping[str, Any]) -> list[str]:
    """Return the values that a key can have, if they are an enumeration."""
    table, _, key = (given.get("key") or "").partition(".")
    if table == "doctor":
        from integration.doctor.checks import CHECKS  # noqa: PLC0415 - only for completion

        return [check.code.removeprefix("NVSHIM-") for check in CHECKS]
    setting = TABLES.get(table, {}).get(key)
    return list(setting.kind.words) if setting else []


_file = click.option(
    "--config", "file", metavar="FILE", type=click.Path(dir_okay=False),
    help="Use this configuration file instead of the node's.",
)  # fmt: skip
_key = click.argument("key", shell_complete=completing(lambda _: setting_names()))


@command.command("show")
@with_listing
@_file
def show(output: Output, file: str | None) -> None:
    """Show every effective value and where it comes from."""
    source = settings.find_source(file)
    found, notes = settings.read_settings(source)
    in_use = None if source.kind == settings.DEFAULT else source.path
    if output.form.is_document:
        output.document(
            {
                "file": in_use,
                "source": source.kind,
                "settings": [setting.to_json() for setting in found],
                "notes": list(notes),
            }
        )
        return
    for line in (f"in use: {in_use or 'no file, only the defaults'}", *notes):
        click.echo(printable(line), err=True)
    columns = (
        Column("KEY", "key"),
        Column("VALUE", "value", settings.as_words),
        Column("FROM", "origin", _NAMES.__getitem__),
    )
    output.rows([setting.to_json() for setting in found], columns)


@command.command("get")
@with_output
@_file
@_key
def get(output: Output, file: str | None, key: str) -> None:
    """Print the value of KEY; of a list, one entry per line."""
    source = settings.find_source(file)
    found = settings.read_setting(source, key)
    value = found.value
    entries = value if isinstance(value, list) else [] if value is None else [value]
    words = [entry if isinstance(entry, str) else settings.as_words(entry) for entry in entries]
    if output.form.is_document:
        output.document(found.to_json())
    else:
        output.stream.write("".join(f"{printable(word)}\n" for word in words))


_changing = stacked(
    with_output,
    _file,
    click.option(
        "--dry-run", is_flag=True,
        help=f"Show the difference and change nothing; exit with {exits.FOUND} if there is one.",
    ),
)  # fmt: skip
"""The options of the commands that change a file."""


def _apply(output: Output, change: Change, *, dry_run: bool) -> None:
    if change.is_needed and not dry_run:
        settings.write_change(change)
    for note in change.notes:
        click.echo(printable(note), err=True)
    document: dict[str, Any] = {
        "file": change.path,
        "changed": change.is_needed and not dry_run,
        "would_change": change.is_needed,
        "diff": change.diff,
        "notes": list(change.notes),
    }
    if output.form.is_document:
        output.document(document)
    elif dry_run:
        lines = change.diff.splitlines()
        sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))
    found_if(dry_run and change.is_needed)


@command.command("set")
@_changing
@_key
@click.argument("value", nargs=-1, required=True, shell_complete=_values)
def set_value(
    output: Output, file: str | None, key: str, value: tuple[str, ...], *, dry_run: bool
) -> None:
    r"""Set KEY to VALUE in the shim's configuration file; a list as several VALUEs or as TOML.

    The file's comments, order, owner and mode stay. If NVIDIA's configuration is in use, its
    settings are copied first. An invalid result is not written.

    \b
    nvshim config set policy.mode strict
    nvshim config set policy.trusted-namespaces kube-system gpu-operator
    nvshim config set policy.exclude-gpus '[]'
    """
    change = settings.set_setting(settings.find_source(file), key, value)
    _apply(output, change, dry_run=dry_run)


@command.command("unset")
@_changing
@_key
def unset(output: Output, file: str | None, key: str, *, dry_run: bool) -> None:
    """Remove KEY from the shim's configuration file, so that its default applies."""
    _apply(output, settings.remove_setting(settings.find_source(file), key), dry_run=dry_run)


@command.command("validate")
@with_output
@click.argument("file", required=False, type=click.Path(dir_okay=False))
def validate(output: Output, file: str | None) -> None:
    """Check a configuration FILE of the shim or of NVIDIA's toolkit; by default the one in use.

    The exit status is 3 if it is not valid.
    """
    source = settings.find_source(file)
    notes: tuple[str, ...] = ()
    wrong: NvshimError | None = None
    if source.kind != settings.DEFAULT:
        try:
            notes = settings.validate(source.path).notes
        except ConfigError as error:
            wrong = error
    in_use = None if source.kind == settings.DEFAULT else source.path
    lines = [f"{in_use or 'no file, only the defaults'}: {'not valid' if wrong else 'valid'}"]
    lines += [str(wrong)] if wrong else list(notes)
    document = {
        "file": in_use,
        "valid": wrong is None,
        "error": None if wrong is None else {"code": wrong.code, "message": str(wrong)},
        "notes": list(notes),
    }
    output.text("\n".join(printable(line) for line in lines), document)
    found_if(wrong)
