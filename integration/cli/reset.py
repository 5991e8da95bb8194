"""``nvshim reset``: reset a GPU that no process holds, and return it to service."""

from __future__ import annotations

from typing import Any

import click

from hooks.config import Config
from integration.cli.drain import drain_request, holder_options
from integration.cli.options import configured, located, with_output
from integration.cli.output import Output
from integration.cli.progress import Progress
from integration.drain.serving import reset


@click.command("reset")
@with_output
@configured
@located
@click.argument("gpu", metavar="GPU")
@holder_options
def command(output: Output, config: Config, *, gpu: str, wait: float | None, **more: Any) -> None:
    r"""Reset a GPU: drain it, run nvidia-smi --gpu-reset, check that it answers, and return it.

    Without --wait or --force the GPU is reset only if no process holds it. The node agent closes
    NVML meanwhile. After a failure or an interrupt the GPU stays out of service, and `nvshim list`
    shows the last step: run the command again, or `nvshim undrain`. A GPU that was out of service
    before stays out of service.

    \b
    nvshim reset 3 --wait=10m
    nvshim reset 3 --force
    """
    request = drain_request(wait=wait, lets_go=True, **more)
    with Progress(output) as progress:
        answer = reset(config, gpu, request, progress.update)
    after = "is back in service" if answer["in_service"] else "stays out of service, as before"
    output.text(f"{answer['name']} was reset, answers, and {after}", answer)
