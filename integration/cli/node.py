"""``nvshim node``: the node agent (:mod:`integration.node`)."""

from __future__ import annotations

import functools
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import anyio
import click

from api.errors import printable
from integration.cli import exits
from integration.cli.node_options import agent_options, options_of
from integration.cli.options import configured, with_output
from integration.cli.output import Format, serialized
from integration.node.agent import is_ready, serve
from integration.node.health.policy import policy_of
from integration.node.plugin.settings import as_document

if TYPE_CHECKING:
    from collections.abc import Callable

    from hooks.config import Config
    from integration.cli.node_options import Told
    from integration.cli.output import Output
    from integration.node.components import Options

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
    options = options_of(told, spec="" if spec == "none" else spec, poll=poll)
    policy_of(config, options.ignored_xids, options.heeded_xids)  # what is wrong is said now
    if check_config:
        _show_settings(output, options)
        return
    seen = anyio.run(functools.partial(serve, once=once), config, options, _log(log_format))
    if once and seen.faults:
        click.get_current_context().exit(exits.FOUND)


def _show_settings(output: Output, options: Options) -> None:
    if options.settings is None:
        return
    settings = options.settings.load()
    for note in settings.notes:
        click.echo(printable(note), err=True)
    document = as_document(settings)
    output.text(serialized(document, Format.YAML), document)


def _encode(_logger: Any, _level: str, line: Any) -> bytes:
    data: bytes = line.encode(errors="backslashreplace")
    return data


def _log(form: str) -> Callable[..., None]:
    import structlog  # noqa: PLC0415 - readiness, which is asked all the time, writes no log

    render: Any = (
        structlog.processors.JSONRenderer()
        if form == "json"
        else structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"])
    )
    # Without a buffer, in which a line that cannot be written would stay.
    fd = sys.stderr.fileno() if sys.stderr else os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    stderr = open(fd, "wb", buffering=0, closefd=False)  # noqa: SIM115 - for as long as we are
    logger = structlog.wrap_logger(
        structlog.BytesLogger(stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            render,
            _encode,
        ],
    )

    def say(level: str, event: str, **fields: Any) -> None:
        # A full disk, or a reader that has gone, is no reason to give nobody a GPU.
        with suppress(OSError):
            getattr(logger, level)(event, **fields)

    return say
