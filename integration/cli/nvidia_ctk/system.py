"""``nvidia-ctk system``: create device nodes and links in /dev/char."""

from __future__ import annotations

from typing import Any

import click

from integration.cli.nvidia_ctk.global_flags import GlobalFlags
from integration.compat.gocli import GoGroup
from integration.devices.creating import CreateOptions, Step, StepState, create, refuse_failures


@click.group("system", cls=GoGroup)
def command() -> None:
    """A collection of system-related utilities for the NVIDIA Container Toolkit."""


def _log_steps(global_flags: GlobalFlags, steps: list[Step]) -> None:
    for step in steps:
        if step.state in {StepState.MADE, StepState.ABSENT}:
            global_flags.stderr.info(f"Creating {step.kind} {step.path}")
        elif step.reason:
            global_flags.stderr.warning(f"{step.path}: {step.reason}")
    refuse_failures(steps)


@command.command("create-device-nodes")
@click.option("--root", "--driver-root", "driver_root", default="", metavar="PATH",
              envvar=["NVIDIA_DRIVER_ROOT", "DRIVER_ROOT"], help="The root with kernel modules "
              "and, unless --dev-root is set, dev.")  # fmt: skip
@click.option("--dev-root", default="", envvar=["NVIDIA_DEV_ROOT", "DEV_ROOT"], metavar="PATH",
              help="The directory that contains dev.")  # fmt: skip
@click.option("--control-devices", is_flag=True, help="Create nvidiactl, nvidia-modeset, "
              "nvidia-uvm and nvidia-uvm-tools.")  # fmt: skip
@click.option("--load-kernel-modules", "modules", is_flag=True, envvar="LOAD_KERNEL_MODULES",
              help="Load kernel modules first.")  # fmt: skip
@click.option("--dry-run", is_flag=True, envvar="DRY_RUN", help="Change nothing.")
@click.pass_obj
def create_device_nodes(
    global_flags: GlobalFlags, /, *, driver_root: str, dev_root: str, control_devices: bool,
    modules: bool, dry_run: bool,
) -> None:  # fmt: skip
    """Create NVIDIA device nodes."""
    request = CreateOptions(
        modules=modules, nodes=control_devices, links=False, control_only=True, dry_run=dry_run
    )
    if not control_devices:
        global_flags.stderr.warning("no device nodes selected; see --control-devices")
    node = global_flags.config(driver_root, dev_root or _other_than_host(driver_root))
    _log_steps(global_flags, create(node, request))


def _other_than_host(path: str) -> str:
    """Return the root, or "" for the host's, whose dev the configuration names."""
    return "" if path == "/" else path


@command.command("create-dev-char-symlinks")
@click.option("--driver-root", default="", envvar=["NVIDIA_DRIVER_ROOT", "DRIVER_ROOT"],
              metavar="PATH", help="The root with dev.")  # fmt: skip
@click.option("--create-all", is_flag=True, envvar="CREATE_ALL",
              help="Create links for all possible nodes; here a missing node gets its link when it "
              "is created, or when a container gets it.")  # fmt: skip
@click.option("--load-kernel-modules", "modules", is_flag=True, envvar="LOAD_KERNEL_MODULES",
              help="Load kernel modules first; with --create-all.")  # fmt: skip
@click.option("--create-device-nodes", "nodes", is_flag=True, envvar="CREATE_DEVICE_NODES",
              help="Create control nodes first; with --create-all.")  # fmt: skip
@click.option("--dry-run", is_flag=True, envvar="DRY_RUN", help="Change nothing.")
@click.pass_obj
def create_dev_char_symlinks(global_flags: GlobalFlags, /, **flags: Any) -> None:
    """Create symlinks to possible /dev/nv* devices in /dev/char."""
    for name in ("modules", "nodes"):
        if flags[name] and not flags["create_all"]:
            global_flags.stderr.warning(f"{name} are only created when create-all is set; ignoring")
            flags[name] = False
    if flags["create_all"]:
        global_flags.note(
            "--create-all", "a link is created with its node, or when a container gets it"
        )
    root = flags["driver_root"]
    node = global_flags.config(root, _other_than_host(root))
    dry_run = flags["dry_run"]
    steps = []
    if flags["modules"] or flags["nodes"]:
        first = CreateOptions(modules=flags["modules"], nodes=flags["nodes"], links=False,
                     control_only=True, dry_run=dry_run)  # fmt: skip
        steps += create(node, first)
    steps += create(node, CreateOptions(nodes=False, dry_run=dry_run))
    _log_steps(global_flags, steps)
