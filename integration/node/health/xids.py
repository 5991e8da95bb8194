"""The errors that NVIDIA's driver numbers (XIDs): what each means, and how serious it is.

Rules
- What NVIDIA's device plugin ignores is ignored, but for 109: its catalogue wants the GPU reset, so
  one of it is noted, and several of it count.
- What the catalogue ignores is ignored, but for what it has somebody look at when it goes on (92).
- What ends with the application that made it (RESTART_APP) makes a device suspect. A fault of the
  GPU shows by coming back: several in a while make it unhealthy. NVIDIA's plugin takes the GPU away
  for ever at the first.
- What the catalogue wants the GPU reset for is fatal: the device is not given until a reset, a
  reload of the driver or a boot was seen. Where NVIDIA says that it may pass (119, 120), the device
  has to prove itself instead, and where a workflow decides by registers that nobody told (74, 144
  to 146, 149, 150) too.
- A number that is not here makes a device unhealthy, as NVIDIA's plugin does: it is of a driver
  that is newer than this table, or of what is not expected of any. It can prove itself, too.
- Of a GPU in MIG mode an error with an instance is that instance's, unless it is one of the whole
  GPU (its scope), or is fatal.

Source: NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors, "Analyzing Xid Errors with the
Xid Catalog" and, for Volta and older, the list of the r535 document); nverror.h of the open kernel
modules; internal/rm/health.go of NVIDIA's device plugin for what that one ignores.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["XIDS", "Remedy", "Scope", "Severity", "Xid", "about"]


class Severity(StrEnum):
    """What an error makes of a device."""

    IGNORE = "ignore"
    SUSPECT = "suspect"
    UNHEALTHY = "unhealthy"
    FATAL = "fatal"

    @property
    def weight(self) -> int:
        """How serious it is, to be compared."""
        return list(Severity).index(self)


class Scope(StrEnum):
    """What of a GPU in MIG mode an error is about that names an instance."""

    GPU = "gpu"
    INSTANCE = "instance"


class Remedy(StrEnum):
    """What to do, as a person is told."""

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


@dataclass(frozen=True, slots=True)
class Xid:
    """One number.

    Attributes:
        number: as the driver has it.
        name: NVIDIA's, in short.
        meaning: for people.
        severity: what it makes of a device.
        remedy: what to do.
        scope: what of a GPU in MIG mode it is about that names an instance.
    """

    number: int
    name: str
    meaning: str
    severity: Severity
    remedy: Remedy = Remedy.RESTART_APP
    scope: Scope = Scope.INSTANCE


_IGNORE, _SUSPECT = Severity.IGNORE, Severity.SUSPECT
_BAD, _FATAL = Severity.UNHEALTHY, Severity.FATAL
_GPU: Final = Scope.GPU
_SUPPORT, _RESET, _LINKS = Remedy.SUPPORT, Remedy.RESET, Remedy.LINKS
_NOTHING: Final = Remedy.NOTHING

# Engines that are there several times, each with a number of its own.
_ENGINES: Final = {
    "CE_ERROR": ("copy engine", (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136))),
    "NVDEC_ERROR": ("video decoder", (68, 83, 84, 88, 89, 96, 97, 98)),
    "NVENC_ERROR": ("video encoder", (47, 65, 73, 142)),
    "NVJPG_ERROR": ("JPEG engine", (82, *range(99, 106))),
    "OFA_ERROR": ("optical flow engine", (86, 139)),
}
_FIRST_DECODER: Final = 68  # NVIDIA's plugin ignores it, and no other

_OF_ENGINES: Final = tuple(
    Xid(n, name, f"{engine} {i}: exception", _IGNORE if n == _FIRST_DECODER else _SUSPECT)
    for name, (engine, numbers) in _ENGINES.items()
    for i, n in enumerate(numbers)
)

_OTHERS: Final = (
    Xid(8, "FIFO_ERROR_IDLE_TIMEOUT", "a channel came to a stop", _SUSPECT),
    Xid(11, "GR_ERROR_MISSING_HW", "invalid or corrupted push buffer stream", _SUSPECT),
    Xid(13, "GR_EXCEPTION", "graphics engine exception, as by an array's end", _IGNORE),
    Xid(14, "FAKE_ERROR", "a test", _IGNORE, _NOTHING, _GPU),
    Xid(25, "GR_ILLEGAL_NOTIFY", "invalid or illegal push buffer stream", _SUSPECT),
    Xid(26, "FB_TIMEOUT", "framebuffer timeout", _BAD, _RESET, _GPU),
    Xid(31, "MMU_ERR_FLT", "memory page fault of an application", _IGNORE),
    Xid(32, "PBDMA_ERROR", "invalid or corrupted push buffer stream", _SUSPECT),
    Xid(37, "FECS_ERR_UNIMP_FIRMWARE_METHOD", "driver firmware error", _IGNORE, _SUPPORT),
    Xid(38, "FECS_ERR_WATCHDOG_TIMEOUT", "driver firmware error", _IGNORE, _SUPPORT),
    Xid(42, "VIC_ERROR", "video image compositor: exception", _SUSPECT),
    Xid(43, "RESETCHANNEL_VERIF_ERROR", "a channel of an application was reset", _IGNORE),
    Xid(44, "GR_FAULT_DURING_CTXSW", "fault during a context switch", _IGNORE, _SUPPORT),
    Xid(45, "PREEMPTIVE_REMOVAL", "channels were cleaned up after another error", _IGNORE),
    Xid(46, "GPU_TIMEOUT_ERROR", "the GPU stopped processing", _FATAL, _RESET, _GPU),
    Xid(48, "GPU_ECC_DBE", "double-bit ECC error in memory", _FATAL, Remedy.REPLACE, _GPU),
    Xid(54, "SILENT_RUNNING_PWR_REDUCED_CLOCKING", "auxiliary power is not connected",
        _BAD, Remedy.MECHANICS, _GPU),
    Xid(56, "EVO_ERROR", "display engine error", _SUSPECT, _SUPPORT, _GPU),
    Xid(57, "FBPA_ERROR_1", "error in programming the memory interface", _BAD, _RESET, _GPU),
    Xid(58, "FBPA_ERROR_2", "unstable memory interface", _BAD, Remedy.REPLACE, _GPU),
    Xid(60, "SEC2_ERROR", "video processor exception", _SUSPECT),
    Xid(61, "PMU_BREAKPOINT", "breakpoint of the microcontroller", _SUSPECT, _RESET, _GPU),
    Xid(62, "PMU_HALT_ERROR", "the microcontroller halted", _FATAL, _RESET, _GPU),
    Xid(63, "DRAM_RETIREMENT_EVENT", "a row of memory is remapped at the next reset",
        _IGNORE, Remedy.RESET_LATER, _GPU),
    Xid(64, "DRAM_RETIREMENT_FAILURE", "a row of memory could not be remapped",
        _FATAL, Remedy.REPLACE, _GPU),
    Xid(66, "FECS_ERR_REG_ACCESS_VIOLATION", "illegal access by driver firmware", _IGNORE),
    Xid(67, "FECS_ERR_VERIF_VIOLATION", "illegal access by driver firmware", _IGNORE),
    Xid(69, "GR_CLASS_ERROR", "graphics engine class error", _SUSPECT),
    Xid(74, "NVLINK_ERROR", "NVLink error", _BAD, _LINKS, _GPU),
    Xid(78, "VGPU_START_ERROR", "a vGPU could not be started", _SUSPECT, Remedy.SOFTWARE, _GPU),
    Xid(79, "GPU_HAS_FALLEN_OFF_THE_BUS", "the GPU has fallen off the bus",
        _FATAL, Remedy.REBOOT, _GPU),
    Xid(80, "PBDMA_PUSHBUFFER_CRC_MISMATCH", "corrupted data sent to the GPU", _SUSPECT),
    Xid(81, "VGA_SUBSYSTEM_ERROR", "VGA subsystem error", _SUSPECT, _SUPPORT, _GPU),
    Xid(92, "EXCESSIVE_SBE_INTERRUPTS", "high rate of single-bit ECC errors",
        _SUSPECT, _SUPPORT, _GPU),
    Xid(93, "INFOROM_ERASE_LIMIT_EXCEEDED", "InfoROM is worn", _IGNORE, _SUPPORT, _GPU),
    Xid(94, "CONTAINED_ERROR", "memory error, contained in one application", _SUSPECT),
    Xid(95, "UNCONTAINED_ERROR", "memory error, not contained in one application",
        _FATAL, Remedy.REPLACE, _GPU),
    Xid(106, "SMBPBI_TEST_MESSAGE", "a test", _IGNORE, _NOTHING, _GPU),
    Xid(107, "SMBPBI_TEST_MESSAGE_SILENT", "a test", _IGNORE, _NOTHING, _GPU),
    Xid(108, "NVLINK_REMOTE_TRANSLATION_ERROR", "address of another GPU that is not mapped",
        _IGNORE),
    Xid(109, "CTXSW_TIMEOUT_ERROR", "context switch timeout", _SUSPECT, _RESET),
    Xid(110, "SEC_FAULT_ERROR", "security fault", _FATAL, _RESET, _GPU),
    Xid(119, "GSP_RPC_TIMEOUT", "the GPU's firmware did not answer", _BAD, _RESET, _GPU),
    Xid(120, "GSP_ERROR", "error in the GPU's firmware", _BAD, _RESET, _GPU),
    Xid(121, "C2C_ERROR", "corrected error of the link to the CPU", _IGNORE, _SUPPORT, _GPU),
    Xid(136, "ALI_TRAINING_FAIL", "an NVLink could not be trained", _FATAL, _LINKS, _GPU),
    Xid(137, "NVLINK_PRIV_ERR", "access over NVLink that was refused", _IGNORE),
    Xid(140, "UNRECOVERABLE_ECC_ERROR_ESCAPE", "ECC error that could not be dealt with",
        _FATAL, Remedy.REPLACE, _GPU),
    Xid(141, "FAST_PATH_ERROR", "fast path error", _IGNORE, _SUPPORT),
    Xid(143, "GPU_INIT_ERROR", "the GPU could not be initialised", _FATAL, _RESET, _GPU),
    Xid(144, "NVLINK_SAW_ERROR", "NVLink error (SAW)", _BAD, _LINKS, _GPU),
    Xid(145, "NVLINK_RLW_ERROR", "NVLink error (RLW)", _BAD, _LINKS, _GPU),
    Xid(146, "NVLINK_TLW_ERROR", "NVLink error (TLW)", _BAD, _LINKS, _GPU),
    Xid(147, "NVLINK_TREX_ERROR", "NVLink error (TREX)", _IGNORE, _LINKS, _GPU),
    Xid(148, "NVLINK_NVLPW_CTRL_ERROR", "NVLink error (NVLPW_CTRL)", _IGNORE, _LINKS, _GPU),
    Xid(149, "NVLINK_NETIR_ERROR", "NVLink error (NETIR)", _BAD, _LINKS, _GPU),
    Xid(150, "NVLINK_MSE_ERROR", "NVLink error (MSE)", _BAD, _LINKS, _GPU),
    Xid(151, "KEY_ROTATION_ERROR", "key rotation error", _FATAL, Remedy.REBOOT, _GPU),
    Xid(152, "DLA_SMMU_ERROR", "DLA: memory management error", _IGNORE, _SUPPORT),
    Xid(153, "DLA_TIMEOUT", "DLA: timeout", _IGNORE, _SUPPORT),
    Xid(154, "GPU_RECOVERY_ACTION_CHANGED", "the driver says what it needs to recover",
        _SUSPECT, _RESET, _GPU),
    Xid(155, "NVLINK_SW_DEFINED_ERROR", "an NVLink went down", _SUSPECT, _LINKS, _GPU),
    Xid(156, "RESOURCE_RETIREMENT_EVENT", "a part of the GPU was retired", _FATAL, _RESET, _GPU),
    Xid(157, "RESOURCE_RETIREMENT_FAILURE", "a part of the GPU could not be retired",
        _SUSPECT, _SUPPORT, _GPU),
    Xid(158, "GPU_FATAL_TIMEOUT", "fatal timeout", _FATAL, _RESET, _GPU),
    Xid(159, "CHI_NON_DATA_ERROR", "error of the link to the CPU", _SUSPECT, _SUPPORT, _GPU),
    Xid(160, "CHANNEL_RETIREMENT_EVENT", "a memory channel was retired", _IGNORE, _SUPPORT, _GPU),
    Xid(161, "CHANNEL_RETIREMENT_FAILURE", "a memory channel could not be retired",
        _SUSPECT, _SUPPORT, _GPU),
    Xid(162, "PSHC_REENGAGED", "power smoothing works again", _IGNORE, _NOTHING, _GPU),
    Xid(163, "PSHC_DISENGAGED", "power smoothing stopped", _IGNORE, _SUPPORT, _GPU),
    Xid(164, "PSHC_LOW_LIFETIME", "power smoothing is nearly worn", _IGNORE, _SUPPORT, _GPU),
    Xid(165, "PSHC_ZERO_LIFETIME", "power smoothing is worn", _IGNORE, _SUPPORT, _GPU),
    Xid(166, "NVLINK_SECURE_CRYPTO_ERR", "NVLink encryption error", _SUSPECT, _LINKS, _GPU),
    Xid(167, "PCIE_FATAL_TIMEOUT", "fatal timeout on PCIe", _FATAL, Remedy.REBOOT, _GPU),
    Xid(168, "REDUCED_GPU_MEMORY_CAPACITY", "less memory than usual", _SUSPECT, _SUPPORT, _GPU),
    Xid(169, "SEC2_HALT_ERROR", "the security processor halted", _BAD, _RESET, _GPU),
    Xid(170, "NVLINK_SECURE_OTHER", "NVLink security error", _SUSPECT, _LINKS, _GPU),
    Xid(171, "UNCORRECTABLE_DRAM_ERROR", "tells of an error 48 that it was in DRAM",
        _SUSPECT, Remedy.RESET_LATER, _GPU),
    Xid(172, "UNCORRECTABLE_SRAM_ERROR", "tells of an error 48 that it was in SRAM",
        _SUSPECT, Remedy.RESET_LATER, _GPU),
)  # fmt: skip

XIDS: Final[Mapping[int, Xid]] = {
    xid.number: xid for xid in sorted((*_OF_ENGINES, *_OTHERS), key=lambda xid: xid.number)
}
"""Every number that is known."""


def about(number: int) -> Xid:
    """What is known of a number; of one that is not known, that it is not."""
    return XIDS.get(number) or Xid(
        number, "", "unknown to this version", Severity.UNHEALTHY, Remedy.SUPPORT, Scope.GPU
    )
