"""Plan the control daemons of resource claims.

Rules
- A claim's plan leaves devices of other claims alone. MIG devices have no compute mode, so the
  agent sets none for a daemon that serves them.
- A lost device is left out, as for a resource. So is a device that the inventory does not have yet:
  a new MIG device appears there a moment later. A device that is out of service is kept, because
  its claim keeps it.
- The daemon keeps running when the agent stops, because the kubelet may start containers of the
  claim in the meantime.
- Not every driver's control program can serve several users at once: branch 555 can, branch 550
  cannot and reports no error. So the agent first searches the program's file for the option.
  GPUs before Volta do not support it.

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
"""The part before the slash in a daemon's name: CLAIMS for the daemon of one claim, SHARES for the
daemon of a device of which several claims hold shares. No resource has such a name."""

MULTI_USER: Final = "-multiuser-server"
_VOLTA: Final = 7


def is_of_claims(name: str) -> bool:
    """Whether a daemon of this name serves claims."""
    return name.startswith((f"{CLAIMS}/", f"{SHARES}/"))


def is_of_claim(name: str) -> bool:
    """Whether a daemon of this name serves a single claim; the name is never used again."""
    return name.startswith(f"{CLAIMS}/")


def plan_of_claim(name: str, daemon: ClaimDaemon, inventory: Inventory) -> Plan:
    """Return the plan for the control daemon of a claim.

    Args:
        name: the daemon's name.

    Raises:
        MpsImpossible: the driver or a GPU does not support the request.
        MpsProgramMissing: the driver lacks a program of MPS.
    """
    gpus = {gpu.index: gpu for gpu in inventory.gpus}
    known = {gpu.uuid: (gpu.index, -1, gpu.lost) for gpu in inventory.gpus if not gpu.mig}
    known |= {
        mig.uuid: (mig.gpu, mig.index, gpus[mig.gpu].lost)
        for mig in inventory.mig_devices
        if mig.gpu in gpus
    }
    devices = sorted(known.keys() & daemon.limits, key=lambda uuid: known[uuid][:2])
    plan = Plan(
        resource=name,
        devices=tuple(uuid for uuid in devices if not known[uuid][2]),
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
                do="run all containers of the claim as one user",
            )  # fmt: skip
    if not _supports(plan.programs, MULTI_USER):
        raise MpsImpossible(
            asked,
            found=f"the control program of driver {plan.driver} has no option {MULTI_USER}",
            do="install a driver of branch 555 or newer, or run all containers as one user",
        )


def _supports(programs: Programs, option: str) -> bool:
    """Whether the control program supports an option."""
    try:
        return option.encode() in (read_file(programs.root + programs.control) or b"")
    except OSError:
        return False
