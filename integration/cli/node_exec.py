"""``nvshim node-exec``: run nvshim in the node's root, from a DaemonSet's container."""

from __future__ import annotations

import os

import click

from integration.kubernetes.errors import NodeWithoutGpu
from integration.kubernetes.host import Host
from integration.kubernetes.host_exec import exec_in_host, is_idle
from integration.kubernetes.status import Log
from integration.kubernetes.stop_signals import Stopped, raise_on_stop_signals


@click.command("node-exec", context_settings={"ignore_unknown_options": True})
@click.option(
    "--host",
    metavar="DIR",
    default="/host",
    show_default=True,
    help="The mount point of the node's root.",
)
@click.option(
    "--prefix", metavar="DIR", default="/opt/containerd-shim-nvidia", show_default=True,
    help="The directory of installed trees on the node.",
)  # fmt: skip
@click.option(
    "--without-gpu", type=click.Choice(["wait", "succeed", "fail"]), default="wait",
    show_default=True,
    help="What to do on a node without an NVIDIA GPU, where nvshim is not installed.",
)  # fmt: skip
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def command(host: str, prefix: str, without_gpu: str, words: tuple[str, ...]) -> None:
    """Run the node's own nvshim with the arguments WORDS, once it is installed.

    For a container with the node's root mounted. The program runs in that root and sees the host's
    file system.
    """
    program = os.path.join(prefix, "current", "bin", "nvshim")
    raise_on_stop_signals()
    try:
        with Host(host) as node:
            if without_gpu != "wait" and is_idle(node, program):
                if without_gpu == "succeed":
                    return
                raise NodeWithoutGpu(
                    f"to run nvshim {' '.join(words)}", found="the node has no NVIDIA GPU"
                )
            exec_in_host(
                node, program, words, environment=os.environ,
                on_wait=lambda: Log().info("waiting until nvshim is installed", path=program),
            )  # fmt: skip
    except Stopped:
        return
