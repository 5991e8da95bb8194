"""The control daemons of resource claims: what each is to be like, beside those of resources.

Rules
- A claim says nothing of devices that others have. Of a daemon that serves MIG devices no compute
  mode is set: those have none.
- A device that is lost is left out, as for a resource, and so is one that is not seen: a MIG device
  that was just made will be. One that is out of service is not: who has it, keeps it.
- A daemon stays when the agent ends: containers of the claim may be started meanwhile.
- Not every driver's control program can serve several users at once. Whether one can is asked of
  the program's file: an option that it does not know it would ignore.

Source: nvidia-cuda-mps-control(1), of newer drivers.
"""

from __future__ import annotations

from typing import Final

from hooks.node.inventory import Inventory
from integration.files import read_file
from integration.node.components import NO, Context
from integration.node.errors import MpsImpossible
from integration.node.mps.plan import ClaimDaemon, Plan, Programs, programs_of
from integration.node.plugin.values import Settings

__all__ = ["CLAIMS", "SHARES", "is_of_claims", "plan_of_claim", "settings_of"]

CLAIMS: Final = "claims"
SHARES: Final = "shares"
"""What comes before the slash in the names of daemons: of a claim's devices, and of a GPU of which
claims have shares. No resource is called so."""

MULTI_USER: Final = "-multiuser-server"


def is_of_claims(name: str) -> bool:
    """Whether a daemon is one of claims, by what it is called."""
    return name.startswith((f"{CLAIMS}/", f"{SHARES}/"))


def settings_of(context: Context) -> Settings | None:
    """The device plugin's settings, which say where MPS has its files; None if not known yet.

    An agent that is no device plugin reads them here, if it has claims.

    Raises:
        SettingsError: something of them is wrong.
    """
    options = context.options
    if context.board.settings is not None or options.device_plugin != NO or not options.dra:
        return context.board.settings
    return Settings() if options.settings is None else options.settings.load()


def plan_of_claim(name: str, daemon: ClaimDaemon, inventory: Inventory) -> Plan:
    """What the control daemon of a claim is to be like.

    Args:
        name: what it is called.

    Raises:
        MpsImpossible: the driver cannot do what is asked for.
        MpsProgramMissing: the driver has not all of MPS.
    """
    gpus = {gpu.index: gpu for gpu in inventory.gpus}
    there = {gpu.uuid: (gpu.index, -1, gpu.lost) for gpu in inventory.gpus if not gpu.mig}
    there |= {
        mig.uuid: (mig.gpu, mig.index, gpus[mig.gpu].lost)
        for mig in inventory.mig_devices
        if mig.gpu in gpus
    }
    devices = sorted(there.keys() & daemon.limits, key=lambda uuid: there[uuid][:2])
    plan = Plan(
        resource=name,
        devices=tuple(uuid for uuid in devices if not there[uuid][2]),
        limits={uuid: size for uuid, size in daemon.limits.items() if size},
        others=frozenset(
            gpu.uuid for gpu in inventory.gpus if gpu.uuid not in daemon.limits and not gpu.lost
        ),
        percentage=daemon.threads,
        driver=inventory.driver.version,
        programs=programs_of(inventory.driver),
        options=(MULTI_USER,) if daemon.multi_user else (),
        stays=True,
    )
    if daemon.multi_user and not _knows(plan.programs, MULTI_USER):
        raise MpsImpossible(
            "MPS for several users at once (multiUser)",
            found=f"the control program of driver {plan.driver} has no option {MULTI_USER}",
            do="install a newer driver, or give the containers one user",
        )
    return plan


def _knows(programs: Programs, option: str) -> bool:
    """Whether the control program knows an option."""
    try:
        return option.encode() in (read_file(programs.root + programs.control) or b"")
    except OSError:
        return False
