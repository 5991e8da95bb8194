"""``nvshim node-exec``: what a DaemonSet runs in the root of its node."""

from __future__ import annotations

import os

import click

from integration.kubernetes.entering import become, is_idle
from integration.kubernetes.errors import NodeWithoutGpu
from integration.kubernetes.host import Host
from integration.kubernetes.status import Log
from integration.kubernetes.stopping import Stopped, heed_signals


@click.command("node-exec", context_settings={"ignore_unknown_options": True})
@click.option("--host", metavar="DIR", default="/host", show_default=True, help="The node's root.")
@click.option(
    "--prefix", metavar="DIR", default="/opt/containerd-shim-nvidia", show_default=True,
    help="Where the node has its trees.",
)  # fmt: skip
@click.option(
    "--without-gpu", type=click.Choice(["wait", "succeed", "fail"]), default="wait",
    show_default=True,
    help="What to do on a node that has no NVIDIA GPU, and so no nvshim.",
)  # fmt: skip
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def command(host: str, prefix: str, without_gpu: str, words: tuple[str, ...]) -> None:
    """Become the node's own nvshim with WORDS, once the installer has put it there.

    For a container that has the node's root mounted: the program sees the node as it is.
    """
    program = os.path.join(prefix, "current", "bin", "nvshim")
    heed_signals()  # as process 1, who heeds none is not ended by one
    try:
        with Host(host) as node:
            if without_gpu != "wait" and is_idle(node, program):
                if without_gpu == "succeed":
                    return
                raise NodeWithoutGpu(f"to run nvshim {' '.join(words)}", found="no NVIDIA GPU")
            become(
                node, program, words, environment=os.environ,
                say=lambda: Log().info("waiting for nvshim", path=program),
            )  # fmt: skip
    except Stopped:
        return
