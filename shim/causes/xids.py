"""The numbered errors of NVIDIA's driver (Xids): their meanings, origins and remedies.

Rules
- ``whose`` is derived from the number alone. It is unclear if the catalogue's entry names both the
  application and the hardware.
- The driver's own statement overrides this table (:func:`with_recovery`): NVML's recovery action,
  and the text of Xid 154. Both use the same numbers (:func:`recovery_action`). The words next to
  the number in the text change from driver to driver, so they are ignored.
- For NVLinks of the fifth generation, the line itself has the severity (:func:`is_nonfatal`): each
  GPU of a domain writes such lines when a neighbour fails.
- ``ends`` is false for a number that does not end a container: a notice, a test, or (45) the
  driver's clean-up after any process.
- The node agent decides a number's severity for the device (:mod:`integration.node.faults.xids`).

Source: NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors, "Analyzing Xid Errors with the
Xid Catalog" and, for Volta and older, the list of the r535 document); nverror.h of the open kernel
modules, up to 595.45; nvml.h, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION; logs of drivers 580 to 610.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from api.values import dataclass
from shim.causes.record import Whose

__all__ = [
    "RECOVERY",
    "XIDS",
    "Action",
    "Remedy",
    "Xid",
    "about",
    "is_nonfatal",
    "recovery_action",
    "recovery_asked",
    "with_recovery",
]


class Remedy(StrEnum):
    """The remedies, in words for the node's administrator."""

    NOTHING = "nothing"
    RESTART_APP = "restart the application"
    RESET = "reset the GPU (nvidia-smi --gpu-reset)"
    RESET_LATER = "reset the GPU when it is free (nvidia-smi --gpu-reset)"
    REBOOT = "reboot the node; if it comes back, have the GPU replaced"
    REPLACE = "reset the GPU; if it comes back, have it replaced"
    MECHANICS = "check power cables and cooling"
    SOFTWARE = "update the driver and the firmware"
    LINKS = "look at the links (nvidia-smi nvlink --status), and reset the GPU"
    SUPPORT = "if it comes back, ask the hardware's vendor"
    IMEX = "restart the IMEX domain (nvidia-imex on its nodes)"
    BUS_RESET = "reset the GPU's bus, or reboot the node"
    CATALOGUE = "look the recovery action up in NVIDIA's Xid catalogue"
    SWITCHES = "reset all GPUs and NVSwitches (stop the fabric manager, nvidia-smi --gpu-reset)"


class Action(StrEnum):
    """What the node or its owner must do: the short phrases of a fault's ``action``."""

    NOTHING = ""
    RESET = "reset the GPU"
    RESET_LATER = "reset the GPU when it is free"
    REPLACE = "reset the GPU; replace it if it comes back"
    REBOOT = "reboot the node"
    LINKS = "check the NVLinks and reset the GPU"
    MECHANICS = "check power cables and cooling"
    SOFTWARE = "update the driver and the firmware"
    SUPPORT = "ask the hardware's vendor if it comes back"
    DRAIN = "end what uses the GPU"
    DRAIN_AND_RESET = "drain and reset the GPU"
    IMEX = "restart the IMEX domain"
    BUS_RESET = "reset the GPU's bus"
    CATALOGUE = "see NVIDIA's Xid catalogue"
    SWITCHES = "reset all GPUs and NVSwitches"


_ACTIONS: Final = {
    Remedy.NOTHING: Action.NOTHING,
    Remedy.RESTART_APP: Action.NOTHING,
    Remedy.RESET: Action.RESET,
    Remedy.RESET_LATER: Action.RESET_LATER,
    Remedy.REBOOT: Action.REBOOT,
    Remedy.REPLACE: Action.REPLACE,
    Remedy.MECHANICS: Action.MECHANICS,
    Remedy.SOFTWARE: Action.SOFTWARE,
    Remedy.LINKS: Action.LINKS,
    Remedy.SUPPORT: Action.SUPPORT,
    Remedy.IMEX: Action.IMEX,
    Remedy.BUS_RESET: Action.BUS_RESET,
    Remedy.CATALOGUE: Action.CATALOGUE,
    Remedy.SWITCHES: Action.SWITCHES,
}


@dataclass(frozen=True, slots=True)
class Xid:
    """One number."""

    number: int  # the driver's number
    name: str  # NVIDIA's name, shortened
    meaning: str  # a sentence for users
    remedy: Remedy = Remedy.RESTART_APP  # what to do
    whose: Whose = Whose.UNCLEAR  # the origin, by the number alone
    ends: bool = True  # whether it can end a container
    detail: str = ""  # what an application did, if the number implies it

    @property
    def action(self) -> Action:
        """What the node or its owner must do, in short."""
        return _ACTIONS[self.remedy]


_DEVICE, _APPLICATION, _UNCLEAR = Whose.DEVICE, Whose.APPLICATION, Whose.UNCLEAR
_APP, _RESET, _LINKS = Remedy.RESTART_APP, Remedy.RESET, Remedy.LINKS
_REBOOT, _REPLACE, _SUPPORT = Remedy.REBOOT, Remedy.REPLACE, Remedy.SUPPORT
_NOTHING, _LATER = Remedy.NOTHING, Remedy.RESET_LATER

# Engines with several instances, each with its own number.
_ENGINES: Final = {
    "CE_ERROR": ("copy engine", (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136))),
    "NVDEC_ERROR": ("video decoder", (68, 83, 84, 88, 89, 96, 97, 98)),
    "NVENC_ERROR": ("video encoder", (47, 65, 73, 142)),
    "NVJPG_ERROR": ("JPEG engine", (82, *range(99, 106))),
    "OFA_ERROR": ("optical flow engine", (86, 139)),
}

_OF_ENGINES: Final = tuple(
    Xid(n, name, f"{engine} {i}: exception")
    for name, (engine, numbers) in _ENGINES.items()
    for i, n in enumerate(numbers)
)

_OF_APPLICATIONS: Final = (
    Xid(13, "GR_EXCEPTION", "graphics engine exception", _APP, _APPLICATION,
        detail="an exception in a kernel, as by an index beyond an array's end"),
    Xid(31, "MMU_ERR_FLT", "memory page fault", _APP, _APPLICATION,
        detail="an illegal address in a kernel"),
    Xid(43, "RESETCHANNEL_VERIF_ERROR", "a channel of an application was reset", _APP, _APPLICATION,
        detail="an error of its own made it stop"),
    Xid(108, "NVLINK_REMOTE_TRANSLATION_ERROR", "address of another GPU that is not mapped", _APP,
        _APPLICATION),
)  # fmt: skip

_OF_DEVICES: Final = (
    Xid(26, "FB_TIMEOUT", "framebuffer timeout", _RESET, _DEVICE),
    Xid(46, "GPU_TIMEOUT_ERROR", "the GPU stopped processing", _RESET, _DEVICE),
    Xid(48, "GPU_ECC_DBE", "double-bit ECC error in memory", _REPLACE, _DEVICE),
    Xid(57, "FBPA_ERROR_1", "error in programming the memory interface", _RESET, _DEVICE),
    Xid(58, "FBPA_ERROR_2", "unstable memory interface", _REPLACE, _DEVICE),
    Xid(62, "PMU_HALT_ERROR", "the microcontroller halted", _RESET, _DEVICE),
    Xid(64, "DRAM_RETIREMENT_FAILURE", "a row of memory could not be remapped", _REPLACE, _DEVICE),
    Xid(74, "NVLINK_ERROR", "NVLink error", _LINKS, _DEVICE),
    Xid(79, "GPU_HAS_FALLEN_OFF_THE_BUS", "the GPU has fallen off the bus", _REBOOT, _DEVICE),
    Xid(94, "CONTAINED_ERROR", "memory error, contained in one application", _LATER, _DEVICE),
    Xid(95, "UNCONTAINED_ERROR", "memory error, not contained in one application", _REPLACE,
        _DEVICE),
    Xid(110, "SEC_FAULT_ERROR", "security fault", _RESET, _DEVICE),
    Xid(119, "GSP_RPC_TIMEOUT", "the GPU's firmware did not answer", _RESET, _DEVICE),
    Xid(120, "GSP_ERROR", "error in the GPU's firmware", _RESET, _DEVICE),
    Xid(136, "ALI_TRAINING_FAIL", "an NVLink could not be trained", _LINKS, _DEVICE),
    Xid(140, "UNRECOVERABLE_ECC_ERROR_ESCAPE", "ECC error that could not be dealt with", _REPLACE,
        _DEVICE),
    Xid(143, "GPU_INIT_ERROR", "the GPU could not be initialised", _RESET, _DEVICE),
    Xid(144, "NVLINK_SAW_ERROR", "NVLink error (SAW)", _LINKS, _DEVICE),
    Xid(145, "NVLINK_RLW_ERROR", "NVLink error (RLW)", _LINKS, _DEVICE),
    Xid(146, "NVLINK_TLW_ERROR", "NVLink error (TLW)", _LINKS, _DEVICE),
    Xid(149, "NVLINK_NETIR_ERROR", "NVLink error (NETIR)", _LINKS, _DEVICE),
    Xid(150, "NVLINK_MSE_ERROR", "NVLink error (MSE)", _LINKS, _DEVICE),
    Xid(151, "KEY_ROTATION_ERROR", "key rotation error", _REBOOT, _DEVICE),
    Xid(155, "NVLINK_SW_DEFINED_ERROR", "an NVLink went down", _LINKS, _DEVICE),
    Xid(156, "RESOURCE_RETIREMENT_EVENT", "a part of the GPU was retired", _RESET, _DEVICE),
    Xid(157, "RESOURCE_RETIREMENT_FAILURE", "a part of the GPU could not be retired", _SUPPORT,
        _DEVICE),
    Xid(158, "GPU_FATAL_TIMEOUT", "fatal timeout", _RESET, _DEVICE),
    Xid(159, "CHI_NON_DATA_ERROR", "error of the link to the CPU", _SUPPORT, _DEVICE),
    Xid(161, "CHANNEL_RETIREMENT_FAILURE", "a memory channel could not be retired", _SUPPORT,
        _DEVICE),
    Xid(166, "NVLINK_SECURE_CRYPTO_ERR", "NVLink encryption error", _LINKS, _DEVICE),
    Xid(167, "PCIE_FATAL_TIMEOUT", "fatal timeout on PCIe", _REBOOT, _DEVICE),
    Xid(169, "SEC2_HALT_ERROR", "the security processor halted", _RESET, _DEVICE),
    Xid(170, "NVLINK_SECURE_OTHER", "NVLink security error", _LINKS, _DEVICE),
    Xid(171, "UNCORRECTABLE_DRAM_ERROR", "an error 48 was in DRAM", _LATER,
        _DEVICE),
    Xid(172, "UNCORRECTABLE_SRAM_ERROR", "an error 48 was in SRAM", _LATER,
        _DEVICE),
    # 173 to 176 came with driver 595; NVIDIA's catalogue does not have them yet.
    Xid(173, "C2C fatal link failure", "the link to the CPU failed", _REBOOT, _DEVICE),
    Xid(175, "memory subsystem error", "error of the memory subsystem", _RESET, _DEVICE),
)  # fmt: skip

_UNCLEAR_ONES: Final = (
    Xid(8, "FIFO_ERROR_IDLE_TIMEOUT", "a channel came to a stop"),
    Xid(11, "GR_ERROR_MISSING_HW", "invalid or corrupted push buffer stream"),
    Xid(25, "GR_ILLEGAL_NOTIFY", "invalid or illegal push buffer stream"),
    Xid(32, "PBDMA_ERROR", "invalid or corrupted push buffer stream"),
    Xid(37, "FECS_ERR_UNIMP_FIRMWARE_METHOD", "driver firmware error", _SUPPORT),
    Xid(38, "FECS_ERR_WATCHDOG_TIMEOUT", "driver firmware error", _SUPPORT),
    Xid(42, "VIC_ERROR", "video image compositor: exception"),
    Xid(44, "GR_FAULT_DURING_CTXSW", "fault during a context switch", _SUPPORT),
    Xid(60, "SEC2_ERROR", "video processor exception"),
    Xid(61, "PMU_BREAKPOINT", "breakpoint of the microcontroller", _RESET),
    Xid(66, "FECS_ERR_REG_ACCESS_VIOLATION", "illegal access by driver firmware"),
    Xid(67, "FECS_ERR_VERIF_VIOLATION", "illegal access by driver firmware"),
    Xid(69, "GR_CLASS_ERROR", "graphics engine class error"),
    Xid(78, "VGPU_START_ERROR", "a vGPU could not be started", Remedy.SOFTWARE),
    Xid(80, "PBDMA_PUSHBUFFER_CRC_MISMATCH", "corrupted data sent to the GPU"),
    Xid(109, "CTXSW_TIMEOUT_ERROR", "context switch timeout", _RESET),
    Xid(137, "NVLINK_PRIV_ERR", "access over NVLink that was refused"),
    Xid(152, "DLA_SMMU_ERROR", "DLA: memory management error", _SUPPORT),
    Xid(153, "DLA_TIMEOUT", "DLA: timeout", _SUPPORT),
    Xid(154, "GPU_RECOVERY_ACTION_CHANGED", "the driver says what it needs to recover", _RESET),
    Xid(174, "channel reset", "a channel was reset, which ends its process"),
)

_NOTICES: Final = tuple(
    Xid(number, name, meaning, remedy, ends=False)
    for number, name, meaning, remedy in (
        (14, "FAKE_ERROR", "a test", _NOTHING),
        (45, "PREEMPTIVE_REMOVAL", "channels were cleaned up after another error", _APP),
        (54, "SILENT_RUNNING_PWR_REDUCED_CLOCKING", "auxiliary power is not connected",
         Remedy.MECHANICS),
        (56, "EVO_ERROR", "display engine error", _SUPPORT),
        (63, "DRAM_RETIREMENT_EVENT", "a row of memory is remapped at the next reset", _LATER),
        (81, "VGA_SUBSYSTEM_ERROR", "VGA subsystem error", _SUPPORT),
        (92, "EXCESSIVE_SBE_INTERRUPTS", "high rate of single-bit ECC errors", _SUPPORT),
        (93, "INFOROM_ERASE_LIMIT_EXCEEDED", "InfoROM is worn", _SUPPORT),
        (106, "SMBPBI_TEST_MESSAGE", "a test", _NOTHING),
        (107, "SMBPBI_TEST_MESSAGE_SILENT", "a test", _NOTHING),
        (121, "C2C_ERROR", "corrected error of the link to the CPU", _SUPPORT),
        (141, "FAST_PATH_ERROR", "fast path error", _SUPPORT),
        (147, "NVLINK_TREX_ERROR", "NVLink error (TREX)", _LINKS),
        (148, "NVLINK_NVLPW_CTRL_ERROR", "NVLink error (NVLPW_CTRL)", _LINKS),
        (160, "CHANNEL_RETIREMENT_EVENT", "a memory channel was retired", _SUPPORT),
        (162, "PSHC_REENGAGED", "power smoothing works again", _NOTHING),
        (163, "PSHC_DISENGAGED", "power smoothing stopped", _SUPPORT),
        (164, "PSHC_LOW_LIFETIME", "power smoothing is nearly worn", _SUPPORT),
        (165, "PSHC_ZERO_LIFETIME", "power smoothing is worn", _SUPPORT),
        (168, "REDUCED_GPU_MEMORY_CAPACITY", "less memory than usual", _SUPPORT),
        (176, "PCIe correctable error fault", "many corrected errors on PCIe", _SUPPORT),
    )
)  # fmt: skip

XIDS: Final[Mapping[int, Xid]] = {
    xid.number: xid
    for xid in sorted(
        (*_OF_ENGINES, *_OF_APPLICATIONS, *_OF_DEVICES, *_UNCLEAR_ONES, *_NOTICES),
        key=lambda xid: xid.number,
    )
}
"""All known numbers."""


def about(number: int) -> Xid:
    """Look up a number; for an unknown one, return an entry that says so."""
    return XIDS.get(number) or Xid(number, "", "unknown to this version", _SUPPORT)


# -- the driver's own statements ---------------------------------------------------------------

RECOVERY: Final = 154
"""The number by which the driver reports a new recovery action."""

_RECOVERY_ACTIONS: Final = {
    0: Action.NOTHING,
    1: Action.RESET,
    2: Action.REBOOT,
    3: Action.DRAIN,
    4: Action.DRAIN_AND_RESET,
    5: Action.IMEX,
    6: Action.BUS_RESET,
    7: Action.REBOOT,
}

# Only at the end of the text. Before it comes a name chosen by a process, too short to contain
# this.
_CHANGED: Final = re.compile(
    r"recovery action changed from 0x[0-9a-f]+ \([^()]*\) to 0x([0-9a-f]{1,8}) \([^()]*\)\.?\s*$",
    re.IGNORECASE | re.ASCII,
)


def recovery_action(number: int) -> Action:
    """Return the action for a driver's recovery action, by its number in NVML.

    Args:
        number: the value of NVML's field 230, or the number in the text of an Xid 154.

    Returns:
        The action; for a number that this version does not know, :attr:`Action.CATALOGUE`.
    """
    return _RECOVERY_ACTIONS.get(number, Action.CATALOGUE)


def recovery_asked(text: str) -> Action | None:
    """Return the action in the text of an Xid 154; None if it names none."""
    found = _CHANGED.search(text)
    return recovery_action(int(found[1], 16)) if found else None


_NVLINKS: Final = range(144, 151)
TOLD_BY_TEXT: Final = frozenset({RECOVERY, *_NVLINKS})
"""Xids whose severity is in the line, not in the number."""
# Match the whole line, because a process's chosen name may come first.
_NONFATAL: Final = re.compile(
    r"[A-Z][A-Z0-9_]{0,40} Nonfatal XC\d{1,3} i\d{1,3} Link -?\d{1,3} "
    r"\(0x[0-9a-f]{8}(?: 0x[0-9a-f]{8}){0,15}\)?",
    re.ASCII,
)


def is_nonfatal(number: int, text: str) -> bool:
    """Whether the line of an NVLink Xid (144 to 150) marks it as not fatal.

    Args:
        text: the text after the number; "" if only NVML reported it.
    """
    return number in _NVLINKS and _NONFATAL.fullmatch(text.strip()) is not None


def with_recovery(xid: Xid, action: Action | None) -> tuple[Whose, Action]:
    """Return an error's origin and remedy, given the driver's recovery action.

    If recovery takes more than restarting the applications, the fault is the device's.

    Args:
        xid: the error.
        action: the driver's recovery action; None if unknown, so that the table decides.
    """
    if action is None:
        return xid.whose, xid.action
    if action in {Action.NOTHING, Action.DRAIN}:
        return xid.whose, action
    return Whose.DEVICE, action
