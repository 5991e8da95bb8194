"""``nvshim node``: the node agent (:mod:`integration.node`)."""

from __future__ import annotations

from typing import Final

import click

from hooks.config import Config
from integration import exits
from integration.agent_status import is_ready
from integration.cli.node_options import CliSettings, agent_options
from integration.cli.options import configured, found_if, with_output
from integration.cli.output import Output

_SPEC: Final = "nvidia.yaml"


@click.command("node")
@click.option("--once", is_flag=True, help="Check the node once, update everything, and exit.")
@click.option(
    "--ready", is_flag=True, help="Only report by the exit status whether an agent runs here."
)
@click.option(
    "--check-config", is_flag=True,
    help="Only check the device plugin's settings, and print the effective ones as a file.",
)  # fmt: skip
@click.option(
    "--log-format", type=click.Choice(["logfmt", "json"]), default="logfmt", show_default=True,
    help="The format of log lines on stderr.",
)  # fmt: skip
@agent_options
@with_output
@configured
def command(
    output: Output,
    config: Config,
    *,
    settings: CliSettings,
    once: bool,
    ready: bool,
    check_config: bool,
    log_format: str,
) -> None:
    """Run the node agent: one per node.

    It updates the CDI spec, the inventory, device nodes and the links in /dev/char when a driver is
    installed or replaced, and when GPUs or MIG devices appear or disappear. It exits on SIGTERM,
    and when another version is activated. With --once, the exit status is 3 if the node has a
    fault.

    It is also the kubelet's device plugin, with the flags, variables and configuration file of
    NVIDIA's plugin. A flag overrides its variable, and both override the configuration file.
    """
    if ready:
        click.get_current_context().exit(
            exits.OK if is_ready(config, settings.agent["pod_uid"]) else exits.FOUND
        )
    if settings.agent["spec"] is None:
        settings.agent["spec"] = f"{config.cdi_spec_dirs[-1]}/{_SPEC}"
    from integration.cli.node_agent import run  # noqa: PLC0415 - slow, and --ready does not need it

    is_wrong = run(
        output, config, settings, once=once, check_config=check_config, log_format=log_format
    )
    found_if(is_wrong)
