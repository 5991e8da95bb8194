"""The engine's errors: the branches that :mod:`api.errors` draws, and their leaves.

A leaf says when it is raised. Codes are never reused. The leaves that only one room raises and
catches stand in that room: E03xx in :mod:`hooks.image.rootfs_errors`, E06xx in
:mod:`hooks.cdi.errors`::

    InventoryError  E0100
    ├── NoGpus               E0101    ├── MigUnknown           E0106
    ├── DriverNotFound       E0102    ├── ImexChannelMissing   E0110
    ├── DeviceNodeMissing    E0103    ├── MigCapabilityMissing E0111
    ├── NvmlFailed           E0104    ├── DriverChanged        E0140
    ├── DriverMismatch       E0105    ├── NoVendorDriver       E0650
    ├── NoVendorGpus         E0651    ├── VendorNodeMissing    E0652
    ├── CsvFilesMissing      E0660    ├── DriverStoreMissing   E0661
    └── PlatformNodeMissing  E0662
    RequestError    E0200
    ├── MalformedDevice      E0201    ├── UnsupportedCapability E0224
    ├── UnknownDevice        E0202    ├── RequirementUnmet      E0225
    ├── UnknownCapability    E0203    ├── RequirementUnclear    E0226
    ├── MigModeGpu           E0204    ├── MalformedRequirement  E0227
    ├── AmbiguousDevice      E0205    ├── DeviceHeld            E0228
    ├── TooManyDevices       E0206    ├── ClaimsUnusable        E0229
    ├── MalformedChannel     E0207    ├── FaultExitCodeWrong    E0230
    ├── MalformedMigAccess   E0208    ├── OutOfService          E0231
    ├── RequestDenied        E0221    ├── UnknownVendorGpu      E0653
    ├── GpuExcluded          E0222    ├── MalformedVendorRange  E0654
    └── PrivilegeNeeded      E0223    └── MigUnsupported        E0663
    RootfsError     E0300
    SpecError       E0400
    ├── MalformedSpec        E0401    ├── DeviceConflict       E0403
    ├── VerificationFailed   E0402    └── SpecUnreadable       E0404
    ConfigError     E0500
    ├── ConfigUnreadable     E0501    ├── UnknownConfigKey     E0503
    ├── ConfigMalformed      E0502    └── WrongConfigValue     E0504
    CdiError        E0600
"""

from __future__ import annotations

from collections.abc import Iterable

from api.errors import NvshimError, Status


def enumerated(items: Iterable[str], separator: str = ", ", most: int = 8) -> str:
    """A list in words, cut after ``most``: a message is one line, and a node may be large."""
    every = list(items)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return separator.join(every[:most]) + more


class InventoryError(NvshimError):
    """Something about this node's driver or GPUs."""

    code = "NVSHIM-E0100"
    status = Status.FAILED_PRECONDITION


class NoGpus(InventoryError):
    """The driver is there, and no usable GPU. Raised by :func:`grant.decide`."""

    code = "NVSHIM-E0101"
    remedy = "see what `nvshim list` shows on the node"


class DriverNotFound(InventoryError):
    """No user-space driver below the driver root. Raised by :func:`driver.find_driver`."""

    code = "NVSHIM-E0102"


class DeviceNodeMissing(InventoryError):
    """A device has no usable node below /dev. Raised by :func:`grant.decide`."""

    code = "NVSHIM-E0103"


class NvmlFailed(InventoryError):
    """NVML's answer is absent or nonsense. Raised by :func:`nvml.parse_report`.

    The inventory catches it: the GPUs are known from procfs without NVML.
    """

    code = "NVSHIM-E0104"


class DriverMismatch(InventoryError):
    """The loaded kernel module and the driver's files have different versions.

    Raised by :func:`driver.find_driver`: every NVIDIA program would fail with it, in words
    that are harder to understand.
    """

    code = "NVSHIM-E0105"


class MigUnknown(InventoryError):
    """A MIG device was requested, and NVML could not list them.

    Raised by :func:`grant.decide`.
    """

    code = "NVSHIM-E0106"


class DriverChanged(InventoryError):
    """A container is to start with another driver than it was made with.

    Raised by :func:`identity.refuse_changed`, before the low-level runtime is asked: the task
    can be deleted and created again.
    """

    code = "NVSHIM-E0140"


class RequestError(NvshimError):
    """The container's request cannot be met.

    containerd 1 appends the words for the status to our line, after the remedy. There, "invalid
    argument" would read as a part of the remedy.
    """

    code = "NVSHIM-E0200"
    status = Status.FAILED_PRECONDITION


class MalformedDevice(RequestError):
    """A device's name has none of the known forms. Raised by :func:`request.read_request`."""

    code = "NVSHIM-E0201"


class UnknownDevice(RequestError):
    """A device is well named and this node has none of that name.

    Raised by :func:`grant.decide`.
    """

    # Not NOT_FOUND: containerd would take the container for the thing that is missing.
    code = "NVSHIM-E0202"


class UnknownCapability(RequestError):
    """NVIDIA_DRIVER_CAPABILITIES has a word of unknown meaning.

    Raised by :func:`request.read_request`.
    """

    code = "NVSHIM-E0203"


class MigModeGpu(RequestError):
    """A whole GPU was requested, and it is in MIG mode. Raised by :func:`grant.decide`."""

    code = "NVSHIM-E0204"
    remedy = "name one of its MIG devices, or turn MIG mode off"


class AmbiguousDevice(RequestError):
    """The start of a UUID matches several devices. Raised by :func:`grant.decide`."""

    code = "NVSHIM-E0205"


class TooManyDevices(RequestError):
    """A list names more devices than any node has. Raised by :func:`names.parse_names`."""

    code = "NVSHIM-E0206"


class MalformedChannel(RequestError):
    """An IMEX channel is not a valid number. Raised by :func:`names.parse_channels`."""

    code = "NVSHIM-E0207"


class MalformedMigAccess(RequestError):
    """NVIDIA_MIG_CONFIG_DEVICES or _MONITOR_DEVICES has another value than ``all``.

    Raised by :func:`request.read_request`.
    """

    code = "NVSHIM-E0208"


class RequestDenied(RequestError):
    """Policy denies a request, and is set to fail. Raised by :func:`policy.judge`."""

    code = "NVSHIM-E0221"
    status = Status.PERMISSION_DENIED


class GpuExcluded(RequestError):
    """A GPU is named that the configuration excludes, or a CDI file gives one away.

    Raised by :func:`grant.decide` and :func:`exclusions.refuse_excluded`.
    """

    code = "NVSHIM-E0222"
    status = Status.PERMISSION_DENIED


class PrivilegeNeeded(RequestError):
    """A container without CAP_SYS_ADMIN asks to control MIG. Raised by :func:`policy.judge`."""

    code = "NVSHIM-E0223"
    status = Status.PERMISSION_DENIED


class UnsupportedCapability(RequestError):
    """A driver capability is named that the configuration does not support.

    Raised by :func:`policy.judge`.
    """

    code = "NVSHIM-E0224"


class RequirementUnmet(RequestError):
    """The driver or a GPU is not what the image needs. Raised by :func:`check_requirements`."""

    code = "NVSHIM-E0225"


class RequirementUnclear(RequestError):
    """Whether the image's needs are met depends on a value that NVML did not report.

    Raised by :func:`check_requirements`.
    """

    code = "NVSHIM-E0226"


class MalformedRequirement(RequestError):
    """NVIDIA_REQUIRE_* is not a valid requirement. Raised by :func:`check_requirements`."""

    code = "NVSHIM-E0227"


class DeviceHeld(RequestError):
    """A device has reached its limit of containers. Raised by :mod:`shim.work.claims`."""

    code = "NVSHIM-E0228"
    status = Status.RESOURCE_EXHAUSTED


class ClaimsUnusable(RequestError):
    """A claim of a device with a limit cannot be recorded.

    Raised by :mod:`shim.work.claims`.
    """

    code = "NVSHIM-E0229"


class FaultExitCodeWrong(RequestError):
    """An annotation asks for an exit code that is none. Raised by :func:`prefilter.prefilter`."""

    code = "NVSHIM-E0230"


class OutOfService(RequestError):
    """A device is requested, or listed in the spec, that a person has taken out of service.

    Raised by :func:`grant.decide`, and by :mod:`hooks.node.drained`.
    """

    code = "NVSHIM-E0231"


# -- features besides GPUs (E011x), other vendors (E065x), Tegra and WSL2 (E066x) --------------


class ImexChannelMissing(InventoryError):
    """An IMEX channel was named that has no usable node. Raised by :func:`features.contribute`."""

    code = "NVSHIM-E0110"


class MigCapabilityMissing(InventoryError):
    """The node by which MIG is configured or monitored is not there.

    Raised by :func:`features.contribute`.
    """

    code = "NVSHIM-E0111"


class NoVendorDriver(InventoryError):
    """The vendor's kernel driver is not loaded. Raised by ``give`` of the vendor."""

    code = "NVSHIM-E0650"


class NoVendorGpus(InventoryError):
    """All GPUs of a vendor are requested, and none is usable. Raised by ``gpus.granted``."""

    code = "NVSHIM-E0651"


class VendorNodeMissing(InventoryError):
    """A GPU that is named has no usable render node. Raised by :func:`gpus.granted`."""

    code = "NVSHIM-E0652"


class UnknownVendorGpu(RequestError):
    """No GPU of this node has the name. Raised by :func:`gpus.granted`."""

    code = "NVSHIM-E0653"


class MalformedVendorRange(RequestError):
    """A range of indices ends before it starts. Raised by :func:`names.parse`."""

    code = "NVSHIM-E0654"


class CsvFilesMissing(InventoryError):
    """No file lists what a Tegra machine has. Raised by :func:`tegra.contribute`."""

    code = "NVSHIM-E0660"


class DriverStoreMissing(InventoryError):
    """Windows has no driver of NVIDIA's for WSL. Raised by :func:`wsl.contribute`."""

    code = "NVSHIM-E0661"


class PlatformNodeMissing(InventoryError):
    """/dev/dxg, or all nodes of a Tegra machine, are unusable. Raised by ``contribute``."""

    code = "NVSHIM-E0662"


class MigUnsupported(RequestError):
    """A MIG device is named where there can be none. Raised by :func:`names.refuse_mig`."""

    code = "NVSHIM-E0663"


class RootfsError(NvshimError):
    """Something about the image's files."""

    code = "NVSHIM-E0300"
    status = Status.FAILED_PRECONDITION
    remedy = "look at the image with a shell in it"


class SpecError(NvshimError):
    """Something about the OCI spec, or a mutation of it that must not leave the engine."""

    code = "NVSHIM-E0400"
    status = Status.INVALID_ARGUMENT


class MalformedSpec(SpecError):
    """A part of config.json has the wrong shape. Raised where the part is read."""

    code = "NVSHIM-E0401"


class VerificationFailed(SpecError):
    """A mutated spec breaks an invariant: a defect of ours, stopped before it leaves.

    Raised by :func:`hooks.edits.verification.verify`.
    """

    code = "NVSHIM-E0402"
    status = Status.INTERNAL


class DeviceConflict(SpecError):
    """The spec has another device at the path of one of ours.

    Raised by :func:`hooks.edits.mutation.apply`.
    """

    code = "NVSHIM-E0403"


class SpecUnreadable(SpecError):
    """A spec that a person named cannot be read. Raised by ``nvshim explain``."""

    code = "NVSHIM-E0404"
    remedy = "name a config.json that can be read"


class ConfigError(NvshimError):
    """Something about our own configuration."""

    code = "NVSHIM-E0500"
    status = Status.FAILED_PRECONDITION


class ConfigUnreadable(ConfigError):
    """The configuration file cannot be read. Raised by :func:`config.load_config`."""

    code = "NVSHIM-E0501"
    remedy = "make the file readable"


class ConfigMalformed(ConfigError):
    """The configuration file is not valid TOML. Raised by :func:`config.load_config`."""

    code = "NVSHIM-E0502"
    remedy = "correct the line; `nvshim config validate` tells when it is right"


class UnknownConfigKey(ConfigError):
    """A table or key of our own file that means nothing. Raised by :func:`config.load_config`."""

    code = "NVSHIM-E0503"


class WrongConfigValue(ConfigError):
    """A key's value has the wrong type or is out of range. Raised by :func:`config.load_config`."""

    code = "NVSHIM-E0504"


class CdiError(NvshimError):
    """Something about a CDI spec, or a device of one."""

    code = "NVSHIM-E0600"
    status = Status.FAILED_PRECONDITION
