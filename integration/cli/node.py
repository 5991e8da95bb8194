"""``nvshim node``: the node agent (:mod:`integration.node`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from integration import exits
from integration.agent_status import is_ready
from integration.cli.node_options import agent_options
from integration.cli.options import configured, found_if, with_output

if TYPE_CHECKING:
    from hooks.config import Config
    from integration.cli.node_options import Told
    from integration.cli.output import Output

_SPEC: Final = "nvidia.yaml"


@click.command("node")
@click.option(
    "--cdi-spec",
    metavar="FILE",
    help="The CDI spec to keep; 'none' for none.  [default: nvidia.yaml in the last of the "
    "configuration's spec-dirs, /var/run/cdi]",
)
@click.option(
    "--poll",
    type=click.FloatRange(0.1, 86400),
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="Look that often, also if nothing is heard of a change.",
)
@click.option("--once", is_flag=True, help="Look once, bring everything up to date, and end.")
@click.option(
    "--ready", is_flag=True, help="Only say by the exit status whether an agent keeps this node."
)
@click.option(
    "--check-config", is_flag=True,
    help="Only check the device plugin's settings, and show those in force, as a configuration.",
)  # fmt: skip
@click.option(
    "--log-format", type=click.Choice(["logfmt", "json"]), default="logfmt", show_default=True,
    help="How lines on stderr are written.",
)  # fmt: skip
@agent_options
@with_output
@configured
def command(
    output: Output,
    config: Config,
    *,
    told: Told,
    cdi_spec: str | None,
    poll: float,
    once: bool,
    ready: bool,
    check_config: bool,
    log_format: str,
) -> None:
    """Keep what is told of this node's GPUs true: one agent per node.

    When a driver is installed or replaced, when GPUs or MIG devices come or go, it brings the CDI
    spec, the inventory, device nodes and the links in /dev/char up to date. It ends on SIGTERM, and
    when another version of it is put into effect. With --once, the exit status is 3 if something is
    wrong with the node.

    It is the kubelet's device plugin too, with the flags, variables and configuration of NVIDIA's,
    where a flag comes before its variable, and that before the configuration file.
    """
    if ready:
        click.get_current_context().exit(
            exits.OK if is_ready(config, told.others["pod_uid"]) else exits.FOUND
        )
    spec = f"{config.cdi_spec_dirs[-1]}/{_SPEC}" if cdi_spec is None else cdi_spec
    from integration.cli.node_agent import run  # noqa: PLC0415 - who asks whether it is ready does without

    is_wrong = run(
        output, config, told, spec="" if spec == "none" else spec, poll=poll, once=once,
        check_config=check_config, log_format=log_format,
    )  # fmt: skip
    found_if(is_wrong)
