"""``nvshim doctor``: diagnose this node."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import click

from api.errors import printable
from integration.cli.errors import FileUnusable
from integration.cli.options import found_if, not_empty, with_listing
from integration.cli.output import (
    Column,
    Format,
    Output,
    best_effort,
    counted,
    is_coloured,
    width_of,
)
from integration.cli.tables import headed
from integration.doctor.bundle import report, write_bundle
from integration.doctor.examination import choose, examine, lasting_skips
from integration.doctor.identity import NEEDED, identity_lines
from integration.doctor.places import Places

_STYLES: Final[dict[str, dict[str, Any]]] = {
    "error": {"fg": "red", "bold": True},
    "warning": {"fg": "yellow"},
    "note": {"dim": True},
}
_INDENT: Final = 14
_NARROWEST: Final = 40
_PREFIX: Final = "NVSHIM-"


def _do(finding: Mapping[str, Any]) -> str:
    return ": ".join(filter(None, (finding["remedy"], finding["command"])))


_FINDINGS: Final = (
    Column("SEVERITY", "severity"),
    Column("CODE", "code"),
    Column("WHAT", "title"),
    Column("FOUND", "found"),
    Column("DO", _do),
)
_CHECKS: Final = (
    Column("CODE", "code"),
    Column("SEVERITY", "severity"),
    Column("WHAT", "title"),
    Column("DO", _do, wide=True),
)


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the codes of checks, with or without NVSHIM-."""
    del ctx, param
    codes = [check.code for check in choose()]
    named = [*(code.removeprefix(_PREFIX) for code in codes), *codes]
    return [code for code in named if incomplete and code.startswith(incomplete.upper())] or (
        [] if incomplete else named[: len(codes)]
    )


@click.command("doctor")
@with_listing
@click.option(
    "--only", multiple=True, metavar="CODE", shell_complete=_complete,
    help="Run only this check; repeatable.",
)  # fmt: skip
@click.option(
    "--skip", multiple=True, metavar="CODE", shell_complete=_complete,
    help="Skip this check; repeatable.  To skip it always: nvshim config set doctor.skip CODE",
)  # fmt: skip
@click.option("--errors-only", is_flag=True, help="Show only errors; count the rest.")
@click.option("-v", "--verbose", is_flag=True, help="Show every finding in full.")
@click.option("--list", "listing", is_flag=True, help="List the checks and run none.")
@click.option(
    "--bundle", metavar="FILE.tar.gz", type=click.Path(dir_okay=False),
    help="Write facts and findings to a file, for a support request. It contains no secrets.",
)  # fmt: skip
@click.option(
    "--root",
    default="/",
    metavar="DIR",
    help="Examine the node below this directory; its programs are run.",
)
@click.option(
    "--config", metavar="FILE", callback=not_empty,
    help="Use this configuration instead of the node's.",
)  # fmt: skip
@click.option(
    "--containerd-config", default="", metavar="FILE",
    help="The root file of containerd's configuration; by default the running containerd's.",
)  # fmt: skip
@click.option(
    "--prefix", default="/opt/containerd-shim-nvidia", show_default=True, metavar="DIR",
    help="The directory of the installation.",
)  # fmt: skip
@click.option(
    "--bindir", default="/usr/local/bin", show_default=True, metavar="DIR",
    help="The directory with links to the programs.",
)  # fmt: skip
@click.option(
    "--manifest",
    default="",
    metavar="FILE",
    help="Check the node against these Kubernetes manifests.",
)
@click.option(
    "--kubeconfig", default="", metavar="FILE",
    help="Read RuntimeClasses from this cluster; by default no cluster is contacted.",
)  # fmt: skip
def command(
    output: Output,
    *,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    errors_only: bool,
    verbose: bool,
    listing: bool,
    bundle: str | None,
    root: str,
    config: str | None,
    **places: Any,
) -> None:
    r"""Diagnose this node: find problems and what to do about them.

    Nothing is changed. The exit status is 0 without errors (warnings and notes do not count), 3
    with errors, and 1 if the node could not be examined. `nvshim explain CODE` explains a finding.

    \b
    nvshim doctor                      examine this node
    nvshim doctor --only D010          run one check
    nvshim doctor --bundle doctor.tar.gz
    """
    if listing:
        keys = ("code", "title", "why", "remedy", "command", "reference")
        output.kind = "CheckList"
        rows = [
            {**{key: getattr(check, key) for key in keys}, "severity": check.severity.value}
            for check in choose(only, skip)
        ]
        output.rows(rows, _CHECKS)
        return
    where = Places(root=root, config_path=config, **places)
    for path in (where.containerd_config, where.kubeconfig):
        _refuse_pipe(path, where.at(path))
    lasting, unknown = lasting_skips(where)
    if unknown:
        click.echo(printable(f"doctor.skip has no effect for {', '.join(unknown)}"), err=True)
    asked = choose(only)
    # --only overrides the configured skips.
    checks = choose(only, skip if only else (*skip, *lasting))
    if not checks:
        raise click.UsageError("--only, --skip and doctor.skip leave no check.")
    skipped = [check.code for check in asked if check not in checks]
    examination = examine(where, checks, skipped=skipped, besides=NEEDED)
    if bundle is not None:
        write_bundle(bundle, examination)
    document = report(examination)
    if errors_only:
        document["findings"] = [f for f in document["findings"] if f["severity"] == "error"]
    if output.form.is_document:
        output.document(document)
    elif output.form is Format.TABLE:
        _print_report(output, document, verbose=verbose)
    else:
        output.rows(document["findings"], _FINDINGS, name="code")
    sys.stdout.flush()
    if not output.form.is_document:
        with best_effort():
            sys.stderr.write(f"{_counted(document)}\n")
    found_if(not examination.is_healthy)


def _refuse_pipe(path: str, here: str) -> None:
    """Refuse a pipe or device, which the node's own program would wait for.

    Args:
        path: as it was named; "" for none.
        here: where this process finds it; it need not exist.
    """
    if path and os.path.lexists(here) and not os.path.isfile(here):
        raise FileUnusable(f"to use {path}", found="not a file")


def _print_report(output: Output, document: Mapping[str, Any], *, verbose: bool) -> None:
    """Write the report as text."""
    width = max(width_of(output.stream), _NARROWEST)
    lines: list[str] = []
    for title, text in identity_lines(document["node"]):
        lines += headed(f"{title:<8}", text, width)
    coloured, was_brief = is_coloured(output.stream), False
    for finding in document["findings"]:
        is_brief = bool(finding["line"]) and not verbose
        lines += [] if is_brief and was_brief else [""]
        lines += _head(finding, width, finding["line" if is_brief else "title"], coloured=coloured)
        lines += [] if is_brief else _rest(finding, width, verbose=verbose)
        was_brief = is_brief
    output.stream.write("".join(f"{line}\n" for line in lines))


def _head(finding: Mapping[str, Any], width: int, text: str, *, coloured: bool) -> Sequence[str]:
    severity, code = finding["severity"], finding["code"].removeprefix(_PREFIX)
    head, *more = headed(f"{severity:<8}{code}  ", text, width)
    if coloured:
        head = click.style(severity, **_STYLES[severity]) + head[len(severity) :]
    return [head, *more]


def _rest(finding: Mapping[str, Any], width: int, *, verbose: bool) -> Iterator[str]:
    indent = " " * _INDENT
    yield from headed(indent, finding["found"], width)
    yield from headed(indent, f"do: {finding['remedy']}", width)
    # On lines of their own and never wrapped, so that they can be copied.
    yield from (indent + text for text in finding["command"].split(" && ") if text)
    yield from (indent + text for text in (finding["reference"],) if text and verbose)


def _counted(document: Mapping[str, Any]) -> str:
    counts = ", ".join(counted(count, severity) for severity, count in document["counts"].items())
    skipped = len(document["skipped"])
    more = f"; {skipped} skipped" if skipped else ""
    return f"{counted(len(document['checked']), 'check')}: {counts}{more}"
