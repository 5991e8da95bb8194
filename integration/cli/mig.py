"""``nvshim mig``: apply layouts of MIG devices from a file, and compare GPUs with them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import click

from hooks.config import Config
from integration import exits
from integration.cli.drain import HOLDER_COLUMNS, drain_request, holder_options
from integration.cli.options import (
    configured,
    found_if,
    located,
    stacked,
    with_listing,
    with_output,
)
from integration.cli.output import Column, Format, Output, counted, serialized
from integration.cli.progress import Progress
from integration.mig.serving import (
    apply_layout,
    assert_layout,
    compare,
    export,
    list_layouts,
)
from shim import syscalls

_STEPS: Final = (
    Column("GPU", "gpu", right=True),
    Column("STEP", "step"),
    Column("INSTANCE", "profile"),
    Column("SLICE", "start", right=True),
    Column("DEVICES", "devices"),
)
_LAYOUTS: Final = (Column("LAYOUT", "name"), Column("STATE", "state"), Column("WHY", "why"))

# Seconds until an interrupt is repeated.
_AGAIN: Final = 1.0

_FILE: Final = click.argument("file", type=click.Path(dir_okay=False))
_of_file: Final = stacked(_FILE, click.argument("layout", required=False))


@click.group("mig")
def command() -> None:
    """Apply layouts of MIG devices from a file, and compare this node's GPUs with them.

    Files are those of NVIDIA's mig-parted, version v1. LAYOUT may be omitted if a file has one.
    """


@command.command("apply")
@with_output
@configured
@located
@_of_file
@holder_options
@click.option("--dry-run", is_flag=True,
              help="Change nothing; show what would be destroyed and created, and who holds it."
              "  The exit status is 3 if something would change.")  # fmt: skip
@click.option("--ends-with", "parent", type=int, hidden=True)
def apply_(
    output: Output,
    config: Config,
    *,
    file: str,
    layout: str | None,
    dry_run: bool,
    parent: int | None,
    **more: Any,
) -> None:
    r"""Partition GPUs as a layout says.

    Only GPUs that change are out of service meanwhile. GPU instances that the layout keeps stay.
    Without --wait or --force nothing is changed if a container, process or claim holds what would
    be destroyed. If a step fails, or on SIGINT or SIGTERM, the GPUs get back what they had. After
    a kill the next `nvshim mig apply` does this.

    \b
    nvshim mig apply layouts.yaml all-1g.10gb --dry-run
    nvshim mig apply layouts.yaml all-1g.10gb --wait=10m
    """
    request = drain_request(lets_go=True, **more)
    with _undone_by_sigterm(parent), Progress(output) as progress:
        answer = apply_layout(config, file, layout, request, progress.update, dry_run=dry_run)
    _show(output, answer)
    found_if(dry_run and answer["gpus"])


@command.command("diff")
@with_output
@configured
@_of_file
def diff(output: Output, config: Config, *, file: str, layout: str | None) -> None:
    """Show what a layout would change. The exit status is 3 if it would change something."""
    answer = compare(config, file, layout)
    _show(output, answer)
    found_if(answer["gpus"])


@command.command("assert")
@configured
@_of_file
def assert_(config: Config, *, file: str, layout: str | None) -> None:
    """Check that each GPU of this node matches a layout; exit with 1 if one does not."""
    assert_layout(config, file, layout)


@command.command("export")
@configured
@click.option("-o", "--output", "form", type=click.Choice(["yaml", "json"]), default="yaml",
              show_default=True, help="The file's format.")  # fmt: skip
@click.option("-l", "--label", default="current", show_default=True, metavar="LAYOUT",
              help="The layout's name.")  # fmt: skip
def export_(config: Config, *, form: str, label: str) -> None:
    """Print how the GPUs are partitioned, as a file with one layout."""
    click.echo(serialized(export(config, label), Format(form)), nl=False)


@command.command("list")
@with_listing
@configured
@_FILE
def list_(output: Output, config: Config, *, file: str) -> None:
    """List a file's layouts: applied, possible, or impossible on this node and why."""
    output.rows(list(list_layouts(config, file)), _LAYOUTS)


@contextmanager
def _undone_by_sigterm(parent: int | None) -> Iterator[None]:
    """Treat SIGTERM, which systemd sends, as Ctrl-C.

    Python drops an exception that a signal raises in a finalizer, so once the parent has exited, an
    alarm repeats it. The kernel sends a signal for each thread of the parent; those after the first
    are ignored, because they could interrupt the cleanup before it blocks signals.

    Args:
        parent: the process that started this one, and whose exit counts as SIGTERM; None for none.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # Ctrl-C is ignored, or handled by a caller
        return
    came = False

    def interrupt(*_: object) -> None:
        nonlocal came
        came = True
        if parent is not None:
            signal.signal(signal.SIGTERM, lambda *_: None)  # programs would inherit SIG_IGN
            signal.setitimer(signal.ITIMER_REAL, _AGAIN)
        signal.raise_signal(signal.SIGINT)

    handled = (signal.SIGTERM,) if parent is None else (signal.SIGTERM, signal.SIGALRM)
    before = {each: signal.signal(each, interrupt) for each in handled}
    try:
        if parent is not None:
            syscalls.die_with_parent(signal.SIGTERM)
            if os.getppid() != parent:  # it had ended before
                interrupt()
        yield
    except KeyboardInterrupt:
        if came:
            raise click.exceptions.Exit(exits.TERMINATED) from None
        raise
    finally:
        if parent is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for each, handler in before.items():
            signal.signal(each, handler)


def _show(output: Output, answer: Mapping[str, Any]) -> None:
    if output.form.is_document:
        output.document(answer)
        return
    gpus: Sequence[Mapping[str, Any]] = answer["gpus"]
    if not gpus:
        click.echo(f"the GPUs are as the layout {answer['layout']} says")
        return
    output.table([step for gpu in gpus for step in _steps(gpu)], _STEPS)
    if answer.get("holders"):
        output.table(answer["holders"], HOLDER_COLUMNS)
    if answer.get("applied"):
        click.echo(f"{counted(len(gpus), 'GPU')} changed to the layout {answer['layout']}")


def _steps(gpu: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a GPU, in the order of the steps."""
    index = {"gpu": gpu["gpu"]}
    yield from ({**index, "step": "destroy", **each} for each in gpu["destroyed"])
    if gpu["switches"]:
        yield {**index, "step": f"MIG mode {'on' if gpu['mig_mode'] else 'off'}"}
    yield from ({**index, "step": "create", **each} for each in gpu["created"])
