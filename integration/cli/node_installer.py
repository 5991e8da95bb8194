"""``nvshim node-installer``: what the installer's DaemonSet runs on a node."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import click

from integration.cli.options import with_output
from integration.cli.output import Output
from integration.kubernetes.environment import ignored, settings_from
from integration.kubernetes.status import Log, check


@click.command("node-installer")
@click.option("--host", metavar="DIR", help="Where the node's root is mounted.")
@click.option("--tree", metavar="DIR", help="The tree to install; by default the program's own.")
@click.option("--wait-for-driver", is_flag=True, default=None, help="Await driver-ready.")
@click.option("--toolkit-ready", is_flag=True, default=None, help="Write toolkit-ready.")
@click.option(
    "--remove-on-exit", is_flag=True, default=None, help="Take everything back at the end."
)
@click.option("--once", is_flag=True, default=None, help="End when everything is done.")
@click.option(
    "--restart", type=click.Choice(["none", "signal", "systemd"]), default=None,
    help="How the engine is restarted if it has to be.",
)  # fmt: skip
@click.option(
    "--probe",
    type=click.Choice(["alive", "ready"]),
    help="Ask the installer of this container how it is, and end.",
)
@with_output
def command(output: Output, probe: str | None, **given: Any) -> None:
    """Install on a Kubernetes node, configure its engine, and keep both so.

    Runs in a container that has the node's root mounted. Is told by variables, those of NVIDIA's
    installer among them; an option has the last word. Ends with status 0 when it is told to (see
    --remove-on-exit), or with --once when everything is done.
    """
    settings = settings_from(os.environ)
    settings = replace(settings, **{k: v for k, v in given.items() if v is not None})
    if probe:
        status = check(probe, settings.local, time.monotonic())
        output.text(f"state  {status.state}", {"state": status.state, "message": status.message})
        return
    # A probe needs none of it.
    from integration.kubernetes.host import Host  # noqa: PLC0415
    from integration.kubernetes.installer import Installer  # noqa: PLC0415
    from integration.kubernetes.stopping import heed_signals  # noqa: PLC0415

    log = Log()
    for name, why in ignored(os.environ).items():
        log.info("a variable that means nothing here", variable=name, why=why)
    heed_signals()
    with Host(settings.host) as host:
        Installer(settings, host, log).run()
