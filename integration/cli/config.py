"""``nvshim config``: the configuration, shown, checked and changed."""

from __future__ import annotations

import re
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
    """Show, check and change the configuration of this node."""


@completing
def _values(given: Mapping[str, Any]) -> list[str]:
    """The words that a key can have, as far as they are words."""
    table, _, key = (given.get("key") or "").partition(".")
    _, _, wanted = TABLES.get(table, {}).get(key, ("", None, ""))
    if table == "doctor":
        from integration.doctor.checks import CHECKS  # noqa: PLC0415 - only a shell asks

        return [check.code.removeprefix("NVSHIM-") for check in CHECKS]
    return re.findall(r'"([a-z-]+)"', wanted) + re.findall(r"\btrue\b|\bfalse\b", wanted)


_file = click.option(
    "--config", "file", metavar="FILE", type=click.Path(dir_okay=False),
    help="The configuration; by default that of this node.",
)  # fmt: skip
_key = click.argument("key", shell_complete=completing(lambda _: setting_names()))


@command.command("show")
@with_listing
@_file
def show(output: Output, file: str | None) -> None:
    """Show every value that holds, and where it comes from."""
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
    for line in (f"in use: {in_use or 'no file; the defaults hold'}", *notes):
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
    """Print the value of KEY; a list as one line for each of its entries."""
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
        help=f"Show the difference and change nothing; status {exits.FOUND} if there is one.",
    ),
)  # fmt: skip
"""What the commands that change a file have in common."""


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
    r"""Give KEY a VALUE in our configuration file; a list as several VALUEs, or as TOML writes it.

    Comments, order, owner and mode of the file stay. If NVIDIA's configuration is in use, what it
    says is taken over first. A file that would not be valid is not written.

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
    """Take KEY out of our configuration file, so that its default holds."""
    _apply(output, settings.remove_setting(settings.find_source(file), key), dry_run=dry_run)


@command.command("validate")
@with_output
@click.argument("file", required=False, type=click.Path(dir_okay=False))
def validate(output: Output, file: str | None) -> None:
    """Check FILE, of ours or of NVIDIA's toolkit, as the shim would; by default the one in use.

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
    lines = [f"{in_use or 'no file; the defaults hold'}: {'not valid' if wrong else 'valid'}"]
    lines += [str(wrong)] if wrong else list(notes)
    document = {
        "file": in_use,
        "valid": wrong is None,
        "error": None if wrong is None else {"code": wrong.code, "message": str(wrong)},
        "notes": list(notes),
    }
    output.text("\n".join(printable(line) for line in lines), document)
    found_if(wrong)
