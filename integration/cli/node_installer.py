"""``nvshim node-installer``: install on a Kubernetes node, from the installer's DaemonSet."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import click

from integration.cli.options import stacked, with_output
from integration.cli.output import Output
from integration.cli.setting_option import setting_option
from integration.kubernetes.environment import ignored, settings_from
from integration.kubernetes.settings import SETTINGS
from integration.kubernetes.status import Log
from integration.kubernetes.status import probe as answer_probe


@click.command("node-installer")
@stacked(*(setting_option(each, default=None) for each in SETTINGS if each.options))
@click.option(
    "--probe",
    type=click.Choice(["alive", "ready"]),
    help="Check whether this container's installer is alive or ready, and exit.",
)
@with_output
def command(output: Output, probe: str | None, **options: Any) -> None:
    """Install the shim on a Kubernetes node, configure its engine, and keep it that way.

    Runs in a container with the node's root mounted. Environment variables configure it, including
    those of NVIDIA's installer; options override them. It exits with status 0 on SIGTERM (see
    --remove-on-exit), or with --once when the installation is complete.
    """
    settings = settings_from(os.environ)
    settings = replace(settings, **{k: v for k, v in options.items() if v is not None})
    if probe:
        status = answer_probe(probe, settings.local, time.monotonic())
        output.text(f"state  {status.state}", {"state": status.state, "message": status.message})
        return
    # Imported here, because a probe does not need them.
    from integration.kubernetes.host import Host  # noqa: PLC0415
    from integration.kubernetes.installer import Installer  # noqa: PLC0415
    from integration.kubernetes.stop_signals import raise_on_stop_signals  # noqa: PLC0415

    log = Log()
    for name, why in ignored(os.environ).items():
        log.info("ignoring a variable that has no effect here", variable=name, why=why)
    raise_on_stop_signals()
    with Host(settings.host) as host:
        Installer(settings, host, log).run()
