"""``nvshim doctor``: what is wrong with this node, and what to do about it."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Any, Final

import click

from integration.cli import exits
from integration.cli.options import with_output
from integration.cli.output import Column, Format, is_terminal
from integration.doctor.bundle import report, write_bundle
from integration.doctor.examination import choose, examine
from integration.doctor.places import Places

if TYPE_CHECKING:
    from collections.abc import Mapping

    from integration.cli.output import Output
    from integration.doctor.examination import Examination

_STYLES: Final[dict[str, dict[str, Any]]] = {
    "error": {"fg": "red", "bold": True},
    "warning": {"fg": "yellow"},
    "note": {"dim": True},
}
_INDENT: Final = " " * 8
_NARROWEST: Final = 40

_FINDINGS: Final = (
    Column("SEVERITY", "severity"),
    Column("CODE", "code"),
    Column("WHAT", "title"),
    Column("FOUND", "found"),
    Column("DO", "do"),
)
_CHECKS: Final = (
    Column("CODE", "code"),
    Column("SEVERITY", "severity"),
    Column("WHAT", "title"),
)


@click.command("doctor")
@with_output
@click.option("--only", multiple=True, metavar="CODE", help="Make this check alone; repeatable.")
@click.option("--skip", multiple=True, metavar="CODE", help="Leave this check out; repeatable.")
@click.option("--list", "listing", is_flag=True, help="List the checks, and make none.")
@click.option(
    "--bundle", metavar="FILE.tar.gz", type=click.Path(dir_okay=False),
    help="Put what was seen and found into a file, for a request of support. It has no secrets.",
)  # fmt: skip
@click.option(
    "--root",
    default="/",
    metavar="DIR",
    help="Examine the node below this directory; programs of it are run.",
)
@click.option("--config", metavar="FILE", help="Our configuration; by default that of the node.")
@click.option(
    "--containerd-config", default="", metavar="FILE",
    help="The root file of containerd's configuration; by default that of the running one.",
)  # fmt: skip
@click.option(
    "--prefix", default="/opt/containerd-shim-nvidia", show_default=True, metavar="DIR",
    help="Where this project is installed.",
)  # fmt: skip
@click.option(
    "--bindir", default="/usr/local/bin", show_default=True, metavar="DIR",
    help="Where its programs are linked.",
)  # fmt: skip
@click.option(
    "--manifest", default="", metavar="FILE", help="Kubernetes manifests to compare with."
)
@click.option(
    "--kubeconfig", default="", metavar="FILE",
    help="Ask the cluster for RuntimeClasses; by default no cluster is asked.",
)  # fmt: skip
def command(
    output: Output,
    *,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    listing: bool,
    bundle: str | None,
    root: str,
    config: str | None,
    **places: Any,
) -> None:
    r"""Find what is wrong with this node, and say what to do about it.

    Nothing is changed. The exit status is 0 if no error was found (warnings and notes are none),
    3 if one was, and 1 if the node could not be examined at all.

    \b
    nvshim doctor                      examine this node
    nvshim doctor --only D010          make one check
    nvshim doctor --bundle doctor.tar.gz
    """
    checks = choose(only, skip)
    if listing:
        output.rows(
            [
                {
                    "code": check.code,
                    "severity": check.severity.value,
                    "title": check.title,
                    "why": check.why,
                    "remedy": check.remedy,
                    "command": check.command,
                    "reference": check.reference,
                }
                for check in checks
            ],
            _CHECKS,
        )
        return
    examination = examine(Places(root=root, config_path=config, **places), checks)
    if bundle is not None:
        write_bundle(bundle, examination)
    if output.form is Format.TABLE:
        _tell(output, report(examination), examination)
    else:
        output.document(report(examination))
    if not examination.is_healthy:
        sys.stdout.flush()
        click.get_current_context().exit(exits.FOUND)


def _tell(output: Output, document: Mapping[str, Any], examination: Examination) -> None:
    findings = document["findings"]
    if is_terminal(output.stream):
        width = shutil.get_terminal_size().columns
        plain = "NO_COLOR" in os.environ
        for finding in findings:
            output.stream.write(_told(finding, width, colourless=plain))
    elif findings:
        rows = [{**finding, "do": ": ".join(_do(finding))} for finding in findings]
        output.rows(rows, _FINDINGS)
    counts = ", ".join(
        f"{count} {_plural(key, count)}" for key, count in document["counts"].items()
    )
    made = len(examination.checks)
    sys.stderr.write(f"{made} {_plural('check', made)}: {counts}\n")


def _told(finding: Mapping[str, Any], width: int, *, colourless: bool) -> str:
    """A finding as a person at a terminal reads it: its parts below one another."""
    severity = finding["severity"]
    title = finding["title"]
    if not colourless:
        severity = click.style(f"{severity:<7}", **_STYLES[severity])
        title = click.style(title, bold=True)
    lines = [f"{severity:<7} {finding['code']}  {title}"]
    remedy, *command = _do(finding)
    for text in (finding["found"], f"do: {remedy}", *command, finding["reference"]):
        # Paths and commands stay whole, so that they can be marked and copied.
        lines += textwrap.wrap(
            text,
            max(width, _NARROWEST),
            initial_indent=_INDENT,
            subsequent_indent=_INDENT,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join([*lines, "", ""])


def _do(finding: Mapping[str, Any]) -> list[str]:
    return [finding["remedy"], *([f"`{finding['command']}`"] if finding["command"] else [])]


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
