"""``nvidia-ctk system``: device nodes and links in /dev/char."""

from __future__ import annotations

import os
from typing import Any

import click

from integration.cli.nvidia_ctk.given import Given
from integration.compat.errors import FlagWithoutMeaning
from integration.compat.gocli import GoGroup
from integration.devices.creating import State, Step, Wish, create, refuse_failures


def _refuse(flag: str, found: str, do: str) -> None:
    raise FlagWithoutMeaning(f"nvidia-ctk … {flag}", found=found, do=do)


@click.group("system", cls=GoGroup)
def command() -> None:
    """A collection of system-related utilities for the NVIDIA Container Toolkit."""


def _told(given: Given, steps: list[Step]) -> None:
    for step in steps:
        if step.state in {State.MADE, State.ABSENT}:
            given.stderr.info(f"Creating {step.kind} {step.path}")
        elif step.reason:
            given.stderr.warning(f"{step.path}: {step.reason}")
    refuse_failures(steps)


@command.command("create-device-nodes")
@click.option("--root", "--driver-root", "driver_root", default="", metavar="PATH",
              envvar=["NVIDIA_DRIVER_ROOT", "DRIVER_ROOT"], help="Where kernel modules are, and "
              "dev unless --dev-root says another.")  # fmt: skip
@click.option("--dev-root", default="", envvar=["NVIDIA_DEV_ROOT", "DEV_ROOT"], metavar="PATH",
              help="Where dev is.")  # fmt: skip
@click.option("--control-devices", is_flag=True, help="nvidiactl, nvidia-modeset, nvidia-uvm, "
              "nvidia-uvm-tools.")  # fmt: skip
@click.option("--load-kernel-modules", "modules", is_flag=True, envvar="LOAD_KERNEL_MODULES",
              help="Load them first.")  # fmt: skip
@click.option("--dry-run", is_flag=True, envvar="DRY_RUN", help="Change nothing.")
@click.pass_obj
def create_device_nodes(
    given: Given, /, *, driver_root: str, dev_root: str, control_devices: bool, modules: bool,
    dry_run: bool,
) -> None:  # fmt: skip
    """Create NVIDIA device nodes."""
    wish = Wish(
        modules=modules, nodes=control_devices, links=False, control_only=True, dry_run=dry_run
    )
    if not control_devices:
        given.stderr.warning("no nodes are asked for; see --control-devices")
    node = given.config(driver_root, dev_root or _other_than_host(driver_root))
    _told(given, create(node, wish))


def _other_than_host(path: str) -> str:
    """A root that is not the host's, whose dev is where its configuration says."""
    return "" if path == "/" else path


@command.command("create-dev-char-symlinks")
@click.option("--dev-char-path", default="", envvar="DEV_CHAR_PATH", metavar="PATH",
              help="Where the links are.")  # fmt: skip
@click.option("--driver-root", default="", envvar=["NVIDIA_DRIVER_ROOT", "DRIVER_ROOT"],
              metavar="PATH", help="Whose dev has the nodes.")  # fmt: skip
@click.option("--create-all", is_flag=True, envvar="CREATE_ALL",
              help="Links of all nodes that there may be; those that there are not get theirs when "
              "a container is given them.")  # fmt: skip
@click.option("--load-kernel-modules", "modules", is_flag=True, envvar="LOAD_KERNEL_MODULES",
              help="Load them first; with --create-all.")  # fmt: skip
@click.option("--create-device-nodes", "nodes", is_flag=True, envvar="CREATE_DEVICE_NODES",
              help="Make control nodes first; with --create-all.")  # fmt: skip
@click.option("--watch", is_flag=True, envvar="WATCH", help="An error; see nvshim node.")
@click.option("--dry-run", is_flag=True, envvar="DRY_RUN", help="Change nothing.")
@click.pass_obj
def create_dev_char_symlinks(given: Given, /, *, dev_char_path: str, **flags: Any) -> None:
    """Create symlinks to possible /dev/nv* devices in /dev/char."""
    if flags["watch"]:
        _refuse("--watch", "this ends when the links are made", "run nvshim node")
    place = os.path.abspath(dev_char_path) if dev_char_path else ""
    if place and os.path.basename(place) != "char":
        _refuse(
            f"--dev-char-path={dev_char_path}", "links are made in a directory named char",
            "name one",
        )  # fmt: skip
    for name in ("modules", "nodes"):
        if flags[name] and not flags["create_all"]:
            given.stderr.warning(f"{name} are only made when create-all is set; ignoring")
            flags[name] = False
    if flags["create_all"]:
        given.note("--create-all", "a link is made with its node, or when a container is given it")
    root = flags["driver_root"]
    node = given.config(root, _other_than_host(root))
    dry_run = flags["dry_run"]
    steps = []
    if flags["modules"] or flags["nodes"]:
        first = Wish(modules=flags["modules"], nodes=flags["nodes"], links=False,
                     control_only=True, dry_run=dry_run)  # fmt: skip
        steps += create(node, first)
    link_dev = os.path.dirname(place) if place else ""
    steps += create(node, Wish(nodes=False, link_dev=link_dev, dry_run=dry_run))
    _told(given, steps)
