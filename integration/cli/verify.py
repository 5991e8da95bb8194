"""``nvshim verify``: run pods on this node and check that they get their GPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import click

from api.errors import NvshimError, printable
from hooks.config import Config
from integration import exits
from integration.cli.options import configured, with_output
from integration.cli.output import Output, best_effort, counted, is_coloured, print_error
from integration.cli.progress import Progress
from integration.cli.tables import headed
from integration.verify.checks import CHECKS
from integration.verify.outcomes import Outcome
from integration.verify.runner import VerifyOptions, verify

_STYLES: Final[dict[str, dict[str, Any]]] = {
    Outcome.PASSED: {"fg": "green"},
    Outcome.FAILED: {"fg": "red", "bold": True},
    Outcome.SKIPPED: {"dim": True},
}
_NAMES: Final = [check.name for check in CHECKS]
# Reports are pasted into issues, so their width does not depend on the terminal.
_WIDTH: Final = 80
_INDENT: Final = 18


def _unchecked(command: Callable[..., None]) -> Callable[..., None]:
    """Exit with status 2 if an error keeps every check from running."""

    @functools.wraps(command)
    def answer(output: Output, **options: Any) -> None:
        try:
            command(output, **options)
        except NvshimError as error:
            with best_effort():
                print_error(error, output.form)
            click.get_current_context().exit(exits.USAGE)

    return answer


@click.command("verify")
@with_output
@_unchecked
@configured
@click.option(
    "--handler", default="nvidia", show_default=True, help="Create pods with this runtime handler."
)
@click.option(
    "--cri-socket", metavar="SOCKET", default="",
    help="Use the engine's CRI at this socket.  [default: the first known socket that exists]",
)  # fmt: skip
@click.option(
    "--only", multiple=True, type=click.Choice(_NAMES),
    help="Run only this check; repeatable.",
)  # fmt: skip
@click.option(
    "--skip", multiple=True, type=click.Choice(_NAMES),
    help="Skip this check; repeatable.",
)  # fmt: skip
@click.option(
    "--restart-agent",
    is_flag=True,
    help="Stop the node agent, and check that nothing is lost when it is started again.",
)
def command(
    output: Output,
    config: Config,
    *,
    handler: str,
    cri_socket: str,
    only: Sequence[str],
    skip: Sequence[str],
    restart_agent: bool,
) -> None:
    r"""Check that pods on this node get their GPUs.

    Create pods through the engine's CRI, with GPUs and without, and look inside them; ask the
    kubelet which devices the device plugin offers. The command needs no registry and no image, and
    removes everything it created. The report has no secrets and no host names, and is 80 columns
    wide.

    The exit status is 0 if no check failed, 1 if a check failed, and 2 if no check could run.

    \b
    nvshim verify                     run every check
    nvshim verify --only gpu          run one check
    nvshim verify --restart-agent     also restart the node agent
    """
    checks = [c for c in CHECKS if c.name not in skip and (not only or c.name in only)]
    if not checks:
        raise click.UsageError("--skip leaves no check of --only.")
    options = VerifyOptions(handler, cri_socket, checks, restart_agent)
    with Progress(output) as progress:
        found = verify(config, options, progress.update)
    failed = found.count(Outcome.FAILED)
    document = {
        "node": found.node,
        "passed": not failed,
        "counts": {str(outcome): found.count(outcome) for outcome in Outcome},
        "seconds": found.seconds,
        "checks": [_document(asdict(result)) for result in found.results],
    }
    output.text("\n".join(_lines(document, coloured=is_coloured(output.stream))), document)
    if failed:
        click.get_current_context().exit(exits.FAILED)


def _document(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result for JSON, with null for empty fields."""
    return {key: None if value == "" else value for key, value in result.items()}


def _lines(document: Mapping[str, Any], *, coloured: bool) -> Iterator[str]:
    """Yield the lines of the report as text."""
    node, counts = document["node"], document["counts"]
    yield from _folded("nvshim  ", f"{node['version']}, policy {node['policy']}")
    yield from _folded("GPUs    ", f"{_gpus(node)}; driver {node['driver']}")
    kubelet = "with a kubelet" if node["kubelet"] else "without a kubelet"
    engine = f"{node['engine']} {node['engine_version']}, handler {node['handler']}, {kubelet}"
    yield from _folded("engine  ", engine)
    yield ""
    for check in document["checks"]:
        outcome = check["outcome"]
        head, *more = _folded(f"{outcome:<8}{check['name']:<10}", check["told"] or check["title"])
        if coloured:
            head = click.style(outcome, **_STYLES[outcome]) + head[len(outcome) :]
        yield head
        yield from more
        if outcome == Outcome.FAILED:
            for key in ("expected", "seen", "do"):
                yield from _folded(" " * _INDENT + f"{key}: ", check[key], indent=_INDENT + 2)
    yield ""
    totals = ", ".join(f"{counts[outcome]} {outcome}" for outcome in Outcome)
    yield f"{counted(sum(counts.values()), 'check')}: {totals}; {document['seconds']:g} s"


def _folded(head: str, text: str, *, indent: int = 0) -> list[str]:
    return headed(head, printable(text), _WIDTH, indent=indent)


def _gpus(node: Mapping[str, Any]) -> str:
    models: dict[str, int] = {}
    for gpu in node["gpus"]:
        kind = gpu["model"] or "of an unknown model"
        kind += " (MIG)" if gpu["mig"] else ""
        models[kind + (" (lost)" if gpu["lost"] else "")] = models.get(kind, 0) + 1
    return ", ".join(f"{count} x {kind}" for kind, count in models.items()) or "none"
