"""The control daemons of resource claims: what each is to be like, beside those of resources.

Rules
- A claim says nothing of devices that others have. Of a daemon that serves MIG devices no compute
  mode is set: those have none.
- A device that is lost is left out, as for a resource, and so is one that is not seen: a MIG device
  that was just made will be. One that is out of service is not: who has it, keeps it.
- A daemon stays when the agent ends: containers of the claim may be started meanwhile.
- Not every driver's control program can serve several users at once: that of branch 555 can, that
  of 550 cannot, and does not say so. So the program's file is looked into first. GPUs before Volta
  cannot.

Sources: nvidia-cuda-mps-control(1) of driver 555.58.02, "-multiuser-server"; NVIDIA's MPS
documentation, "Server"; kubernetes-sigs/dra-driver-nvidia-gpu, sharing.go (Volta).
"""

from __future__ import annotations

from typing import Final

from hooks.node.inventory import Inventory
from integration.agent_errors import MpsImpossible
from integration.files import read_file
from integration.node.mps.plan import ClaimDaemon, Plan, Programs, programs_of

__all__ = ["CLAIMS", "SHARES", "is_of_claim", "is_of_claims", "plan_of_claim"]

CLAIMS: Final = "claims"
SHARES: Final = "shares"
"""What comes before the slash in the names of daemons: of a claim's devices, and of a device of
which claims have shares. No resource is called so."""

MULTI_USER: Final = "-multiuser-server"
_VOLTA: Final = 7


def is_of_claims(name: str) -> bool:
    """Whether a daemon is one of claims, by what it is called."""
    return name.startswith((f"{CLAIMS}/", f"{SHARES}/"))


def is_of_claim(name: str) -> bool:
    """Whether a daemon is one of a single claim, so that there is never another of its name."""
    return name.startswith(f"{CLAIMS}/")


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
    if daemon.multi_user:
        _refuse_multi_user(plan, inventory)
    return plan


def _refuse_multi_user(plan: Plan, inventory: Inventory) -> None:
    asked = "MPS for several users at once (multiUser)"
    for gpu in inventory.gpus:
        major = gpu.compute_capability.partition(".")[0]
        if gpu.uuid in plan.devices and major.isdecimal() and int(major) < _VOLTA:
            raise MpsImpossible(
                asked, found=f"{gpu.uuid} is {gpu.model}, older than Volta",
                do="give the containers one user",
            )  # fmt: skip
    if not _knows(plan.programs, MULTI_USER):
        raise MpsImpossible(
            asked,
            found=f"the control program of driver {plan.driver} has no option {MULTI_USER}",
            do="install a driver of branch 555 or newer, or give the containers one user",
        )


def _knows(programs: Programs, option: str) -> bool:
    """Whether the control program knows an option."""
    try:
        return option.encode() in (read_file(programs.root + programs.control) or b"")
    except OSError:
        return False
