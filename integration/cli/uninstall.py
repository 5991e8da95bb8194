"""``nvshim uninstall``: remove everything that running containers do not need."""

from __future__ import annotations

import os
from typing import Any

import click

from api.errors import printable
from hooks.config import Config
from integration.cli.install import with_place
from integration.cli.options import configured_for, found_if, with_output
from integration.cli.output import Format, Output, counted
from integration.cli.progress import Progress
from integration.install import installing
from integration.install.effects import Installer
from integration.install.uninstall import remedy
from integration.install_layout import InstallLayout


@click.command("uninstall")
@with_place
@click.option("--purge", is_flag=True, help="Remove state and configuration too.")
@click.option(
    "--wait",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    default=0.0,
    help="Wait this long until containers have exited.",
)
@click.option("--force", is_flag=True, help="Uninstall even if an engine still names the shim.")
@click.option("--dry-run", is_flag=True, help="Show what would be done and do nothing.")
@with_output
@configured_for("purge")
def command(
    output: Output,
    config: Config | None,
    *,
    layout: InstallLayout,
    purge: bool,
    wait: float,
    force: bool,
    dry_run: bool,
) -> None:
    """Remove all versions and the links to them.

    First remove the shim from each engine: nvshim configure … --remove. Running containers keep
    running. Versions that they, or a restarted containerd, still need are kept and listed; run the
    command again after the containers have exited.
    """
    if output.form is Format.YAML:
        import yaml  # noqa: F401, PLC0415 - this tree may be gone when the output is written

    with Progress(output) as progress:
        answer = installing.uninstall(
            layout,
            installer=Installer(layout, say=progress.update, ignored_pids=frozenset({os.getpid()})),
            wait=wait,
            purge=config if purge else None,
            force=force,
            dry_run=dry_run,
        )
    output.text("\n".join(map(printable, _lines(answer))), answer)
    found_if(not answer["complete"] and (answer["steps"] or not dry_run))


def _program(answer: dict[str, Any]) -> str:
    """Return the program that can finish: the link may be gone while a version is in use."""
    linked = any(os.path.basename(path) == "nvshim" for path in answer["left"])
    programs = (os.path.join(path, "bin", "nvshim") for path in answer["left"])
    found = next(filter(os.path.exists, programs), "")
    return found if found and not linked else "nvshim"


def _lines(answer: dict[str, Any]) -> list[str]:
    lines = list(answer["steps"]) if answer["dry_run"] else []
    if answer["complete"]:
        lines.append(f"nothing is installed below {answer['prefix']} now")
    elif not answer["dry_run"]:
        shims = len(answer["shims"])
        running = f"it is used by {counted(shims, 'shim')}" if shims else "it is used"
        if answer["unseen_shims"]:
            running = "some shims may not be visible from here"
        lines.append(f"not everything was removed: {running}")
    lines += [f"kept {path}" for path in answer["left"]]
    if not answer["complete"] and not answer["dry_run"]:
        lines.append(f"after they have exited, run {_program(answer)} uninstall again")
    lines += [f"removed {path}" for path in answer["purged"]]
    for path in answer["mentioned_in"]:
        # If nvshim itself was removed, its configure command does not exist.
        way = f"remove it from {path}" if answer["complete"] else remedy([path])
        lines.append(f"{path} still names the shim: {way}, or its pods will fail")
    return lines or ["nothing to do"]
