"""``nvshim reset``: reset a GPU that nobody holds, and return it to service."""

from __future__ import annotations

from typing import Any

import click

from hooks.config import Config
from integration.cli.drain import ending, wish_of
from integration.cli.options import configured, located, with_output
from integration.cli.output import Output
from integration.cli.progress import Progress
from integration.drain.serving import reset


@click.command("reset")
@with_output
@configured
@located
@click.argument("gpu", metavar="GPU")
@ending
def command(output: Output, config: Config, *, gpu: str, wait: float | None, **more: Any) -> None:
    r"""Reset a GPU: out of service, nvidia-smi --gpu-reset, a proof that it answers, and back.

    Without --wait and --force it is reset only if nobody holds it. The node agent lets go of NVML
    meanwhile. What fails or is interrupted leaves the GPU out of service, and `nvshim list` says
    how far it came: run it again, or `nvshim undrain`. A GPU that was out of service before stays
    so.

    \b
    nvshim reset 3 --wait=10m
    nvshim reset 3 --force
    """
    wish = wish_of(wait=wait, lets_go=True, **more)
    with Progress(output) as progress:
        answer = reset(config, gpu, wish, progress.say)
    after = "is in service again" if answer["in_service"] else "stays out of service, as it was"
    output.text(f"{answer['name']} was reset, answers, and {after}", answer)
