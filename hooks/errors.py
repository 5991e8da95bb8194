"""The engine's errors. Codes are never reused.

The errors of a single room are in that room: E03xx in :mod:`hooks.image.rootfs_errors`, E06xx in
:mod:`hooks.cdi.errors`.
"""

from __future__ import annotations

from collections.abc import Iterable

from api.errors import NvshimError, Status


def enumerated(items: Iterable[str], separator: str = ", ", most: int = 8) -> str:
    """Return a list in words, cut after ``most`` entries, since a message must be one line."""
    every = list(items)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return separator.join(every[:most]) + more


class InventoryError(NvshimError, code="NVSHIM-E0100", status=Status.FAILED_PRECONDITION):
    """Something about this node's driver or GPUs."""


class NoGpus(
    InventoryError, code="NVSHIM-E0101", remedy="see what `nvshim list` shows on the node"
):
    """The driver is installed, but the node has no usable GPU. Raised by :func:`grant.decide`."""


class DriverNotFound(InventoryError, code="NVSHIM-E0102"):
    """There is no user-space driver below the driver root. Raised by :func:`driver.find_driver`."""


class DeviceNodeMissing(InventoryError, code="NVSHIM-E0103"):
    """A device has no usable node below /dev. Raised by :func:`grant.decide`."""


class NvmlFailed(InventoryError, code="NVSHIM-E0104"):
    """NVML did not answer, or its answer is not valid. Raised by :func:`nvml.parse_report`.

    The inventory catches it: the GPUs are known from procfs without NVML.
    """


class DriverMismatch(InventoryError, code="NVSHIM-E0105"):
    """The loaded kernel module and the driver's files have different versions.

    Raised by :func:`driver.find_driver`: every NVIDIA program would otherwise fail with an error
    that is harder to understand.
    """


class MigUnknown(InventoryError, code="NVSHIM-E0106"):
    """A MIG device was requested, but NVML could not list the MIG devices.

    Raised by :func:`grant.decide`.
    """


class RequestError(NvshimError, code="NVSHIM-E0200", status=Status.FAILED_PRECONDITION):
    """The container's request cannot be met.

    containerd 1 appends the words for the status to our line, after the remedy. There, "invalid
    argument" would read as a part of the remedy.
    """


# Not NOT_FOUND, which containerd would read as a missing container.
class UnknownDevice(RequestError, code="NVSHIM-E0202"):
    """The device's name is valid, but this node has no such device.

    Raised by :func:`grant.decide`.
    """


class MigModeGpu(
    RequestError, code="NVSHIM-E0204", remedy="name one of its MIG devices, or turn MIG mode off"
):
    """A whole GPU was requested, but it is in MIG mode. Raised by :func:`grant.decide`."""


class DeviceHeld(RequestError, code="NVSHIM-E0228", status=Status.RESOURCE_EXHAUSTED):
    """A device has reached its limit of containers. Raised by :mod:`shim.work.claims`."""


class OutOfService(RequestError, code="NVSHIM-E0231"):
    """A device that is requested, or listed in the spec, was taken out of service.

    Raised by :func:`grant.decide`, and by :mod:`hooks.node.drained`.
    """


class RootfsError(
    NvshimError,
    code="NVSHIM-E0300",
    status=Status.FAILED_PRECONDITION,
    remedy="look at the image with a shell in it",
):
    """A problem with the image's files."""


class SpecError(NvshimError, code="NVSHIM-E0400", status=Status.INVALID_ARGUMENT):
    """Something about the OCI spec, or a mutation of it that must not leave the engine."""


class ConfigError(NvshimError, code="NVSHIM-E0500", status=Status.FAILED_PRECONDITION):
    """Something about our own configuration."""


class WrongConfigValue(ConfigError, code="NVSHIM-E0504"):
    """A key's value has the wrong type or is out of range. Raised by :func:`config.load_config`."""


class CdiError(NvshimError, code="NVSHIM-E0600", status=Status.FAILED_PRECONDITION):
    """Something about a CDI spec, or a device of one."""


# fmt: off
DriverChanged = InventoryError.row("NVSHIM-E0140 driver-changed", Status.FAILED_PRECONDITION,
    "The driver has changed since the container was created, and it was not started yet.")
MalformedDevice = RequestError.row("NVSHIM-E0201 malformed-device", Status.FAILED_PRECONDITION,
    "A device's name has none of the known forms.")
UnknownCapability = RequestError.row("NVSHIM-E0203 unknown-capability", Status.FAILED_PRECONDITION,
    "NVIDIA_DRIVER_CAPABILITIES contains an unknown capability.")
AmbiguousDevice = RequestError.row("NVSHIM-E0205 ambiguous-device", Status.FAILED_PRECONDITION,
    "The start of a UUID matches several devices.")
TooManyDevices = RequestError.row("NVSHIM-E0206 too-many-devices", Status.FAILED_PRECONDITION,
    "A list names more devices than any node has.")
MalformedChannel = RequestError.row("NVSHIM-E0207 malformed-channel", Status.FAILED_PRECONDITION,
    "An IMEX channel is not a valid number.")
MalformedMigAccess = RequestError.row(
    "NVSHIM-E0208 malformed-mig-access", Status.FAILED_PRECONDITION,
    "NVIDIA_MIG_CONFIG_DEVICES or _MONITOR_DEVICES has a value other than ``all``.")
RequestDenied = RequestError.row("NVSHIM-E0221 request-denied", Status.PERMISSION_DENIED,
    "Policy denies the request, and the configuration says that the container must fail then.")
GpuExcluded = RequestError.row("NVSHIM-E0222 gpu-excluded", Status.PERMISSION_DENIED,
    "A requested GPU is excluded by the configuration, or a CDI file contains an excluded one.")
PrivilegeNeeded = RequestError.row("NVSHIM-E0223 privilege-needed", Status.PERMISSION_DENIED,
    "A container without CAP_SYS_ADMIN asks to control MIG.")
UnsupportedCapability = RequestError.row(
    "NVSHIM-E0224 unsupported-capability", Status.FAILED_PRECONDITION,
    "The configuration does not support a requested driver capability.")
RequirementUnmet = RequestError.row("NVSHIM-E0225 requirement-unmet", Status.FAILED_PRECONDITION,
    "The driver or a GPU does not meet the image's requirements.")
RequirementUnclear = RequestError.row(
    "NVSHIM-E0226 requirement-unclear", Status.FAILED_PRECONDITION,
    "Whether the image's requirements are met depends on a value that NVML did not report.")
MalformedRequirement = RequestError.row(
    "NVSHIM-E0227 malformed-requirement", Status.FAILED_PRECONDITION,
    "NVIDIA_REQUIRE_* is not a valid requirement.")
ClaimsUnusable = RequestError.row("NVSHIM-E0229 claims-unusable", Status.FAILED_PRECONDITION,
    "The container's claim on a device with a limit cannot be recorded.")
FaultExitCodeWrong = RequestError.row(
    "NVSHIM-E0230 fault-exit-code-wrong", Status.FAILED_PRECONDITION,
    "An annotation requests an exit code that does not exist.")

# -- features besides GPUs (E011x), other vendors (E065x), Tegra and WSL2 (E066x) --------------
ImexChannelMissing = InventoryError.row(
    "NVSHIM-E0110 imex-channel-missing", Status.FAILED_PRECONDITION,
    "A requested IMEX channel has no usable device node.")
MigCapabilityMissing = InventoryError.row(
    "NVSHIM-E0111 mig-capability-missing", Status.FAILED_PRECONDITION,
    "The device node with which MIG is configured or monitored does not exist.")
NoVendorDriver = InventoryError.row("NVSHIM-E0650 no-vendor-driver", Status.FAILED_PRECONDITION,
    "The vendor's kernel driver is not loaded.")
NoVendorGpus = InventoryError.row("NVSHIM-E0651 no-vendor-gpus", Status.FAILED_PRECONDITION,
    "All GPUs of a vendor are requested, but none is usable.")
VendorNodeMissing = InventoryError.row(
    "NVSHIM-E0652 vendor-node-missing", Status.FAILED_PRECONDITION,
    "A requested GPU has no usable render node.")
UnknownVendorGpu = RequestError.row("NVSHIM-E0653 unknown-vendor-gpu", Status.FAILED_PRECONDITION,
    "No GPU of this node has that name.")
MalformedVendorRange = RequestError.row(
    "NVSHIM-E0654 malformed-vendor-range", Status.FAILED_PRECONDITION,
    "A range of indices ends before it starts.")
CsvFilesMissing = InventoryError.row("NVSHIM-E0660 csv-files-missing", Status.FAILED_PRECONDITION,
    "No file lists what a Tegra machine has.")
DriverStoreMissing = InventoryError.row(
    "NVSHIM-E0661 driver-store-missing", Status.FAILED_PRECONDITION,
    "Windows has no NVIDIA driver for WSL.")
PlatformNodeMissing = InventoryError.row(
    "NVSHIM-E0662 platform-node-missing", Status.FAILED_PRECONDITION,
    "/dev/dxg, or all nodes of a Tegra machine, are unusable.")
MigUnsupported = RequestError.row("NVSHIM-E0663 mig-unsupported", Status.FAILED_PRECONDITION,
    "A MIG device is requested on a platform without MIG.")
MalformedSpec = SpecError.row("NVSHIM-E0401 malformed-spec", Status.INVALID_ARGUMENT,
    "A part of config.json has the wrong type.")
VerificationFailed = SpecError.row("NVSHIM-E0402 verification-failed", Status.INTERNAL,
    "A mutated spec breaks an invariant: a defect of ours, stopped before it leaves.")
DeviceConflict = SpecError.row("NVSHIM-E0403 device-conflict", Status.INVALID_ARGUMENT,
    "The spec has a different device at the path of one that the shim adds.")
SpecUnreadable = SpecError.row("NVSHIM-E0404 spec-unreadable", Status.INVALID_ARGUMENT,
    "A spec that a person named cannot be read.",
    remedy="name a config.json that can be read")
ConfigUnreadable = ConfigError.row("NVSHIM-E0501 config-unreadable", Status.FAILED_PRECONDITION,
    "The configuration file cannot be read.",
    remedy="make the file readable")
ConfigMalformed = ConfigError.row("NVSHIM-E0502 config-malformed", Status.FAILED_PRECONDITION,
    "The configuration file is not valid TOML.",
    remedy="correct the line; `nvshim config validate` tells when it is right")
UnknownConfigKey = ConfigError.row("NVSHIM-E0503 unknown-config-key", Status.FAILED_PRECONDITION,
    "Our configuration file contains an unknown table or key.")
