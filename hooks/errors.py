"""The engine's errors: the branches that :mod:`api.errors` draws, and their leaves.

Each leaf says in its docstring when it is raised and by whom. Codes are never reused::

    InventoryError  E0100
    ├── NoGpus              E0101    ├── NvmlFailed          E0104
    ├── DriverNotFound      E0102    ├── DriverMismatch      E0105
    ├── DeviceNodeMissing   E0103    ├── MigUnknown          E0106
    └── DriverChanged       E0140
    RequestError    E0200   (more leaves: request_errors and policy_errors of hooks.requests)
    ├── MalformedDevice     E0201    ├── UnknownCapability   E0203
    └── UnknownDevice       E0202    └── MigModeGpu          E0204
    RootfsError     E0300   (leaves: hooks.image.rootfs_errors)
    SpecError       E0400
    ├── MalformedSpec       E0401    ├── DeviceConflict      E0403
    ├── VerificationFailed  E0402    └── SpecUnreadable      E0404
    ConfigError     E0500
    ├── ConfigUnreadable    E0501    ├── UnknownConfigKey    E0503
    └── ConfigMalformed     E0502    └── WrongConfigValue    E0504
    CdiError        E0600   (leaves: hooks.cdi.errors)

What is asked beside GPUs has leaves of InventoryError in hooks.edits.feature_errors (E0110, E0111).
GPUs that are not NVIDIA's have leaves of InventoryError and RequestError in
hooks.vendors.errors (E065x), Tegra and WSL2 in hooks.platforms.errors (E066x).
"""

from __future__ import annotations

from api.errors import NvshimError, Status

__all__ = [
    "CdiError",
    "ConfigError",
    "ConfigMalformed",
    "ConfigUnreadable",
    "DeviceConflict",
    "DeviceNodeMissing",
    "DriverChanged",
    "DriverMismatch",
    "DriverNotFound",
    "InventoryError",
    "MalformedDevice",
    "MalformedSpec",
    "MigModeGpu",
    "MigUnknown",
    "NoGpus",
    "NvmlFailed",
    "RequestError",
    "RootfsError",
    "SpecError",
    "SpecUnreadable",
    "UnknownCapability",
    "UnknownConfigKey",
    "UnknownDevice",
    "VerificationFailed",
    "WrongConfigValue",
]


class InventoryError(NvshimError):
    """Something about this node's driver or GPUs."""

    code = "NVSHIM-E0100"
    status = Status.FAILED_PRECONDITION


class NoGpus(InventoryError):
    """The driver is there, and no GPU that could be given. Raised by :func:`grant.decide`."""

    code = "NVSHIM-E0101"


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
    """The loaded kernel module and the driver's files are of different versions.

    Raised by :func:`driver.find_driver`: every NVIDIA program would fail with it, in words
    that are harder to understand.
    """

    code = "NVSHIM-E0105"


class MigUnknown(InventoryError):
    """A MIG device was asked for, and NVML could not say which there are.

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
    """Something about what the container asks for.

    containerd 1 ends our line with the words for its status, behind what is to be done. There,
    "invalid argument" reads as if it were said of the remedy.
    """

    code = "NVSHIM-E0200"
    status = Status.FAILED_PRECONDITION


class MalformedDevice(RequestError):
    """A device's name has none of the known forms. Raised by :func:`request.read_request`."""

    code = "NVSHIM-E0201"


class UnknownDevice(RequestError):
    """A device is well named and this node has none of that name.

    Raised by :func:`grant.decide`. Not NOT_FOUND: containerd would take the container for
    the thing that is missing.
    """

    code = "NVSHIM-E0202"


class UnknownCapability(RequestError):
    """NVIDIA_DRIVER_CAPABILITIES has a word of unknown meaning.

    Raised by :func:`request.read_request`.
    """

    code = "NVSHIM-E0203"


class MigModeGpu(RequestError):
    """A whole GPU was asked for, and it is in MIG mode. Raised by :func:`grant.decide`."""

    code = "NVSHIM-E0204"


class RootfsError(NvshimError):
    """Something about the image's files.

    Who raises one may know better than the class what the reader can do about it.
    """

    code = "NVSHIM-E0300"
    status = Status.FAILED_PRECONDITION
    remedy = "look at the image with a shell in it"

    def __init__(self, asked: str, *, found: str, do: str = "") -> None:
        super().__init__(asked, found=found, do=do or self.remedy)


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


class ConfigError(NvshimError):
    """Something about our own configuration."""

    code = "NVSHIM-E0500"
    status = Status.FAILED_PRECONDITION


class ConfigUnreadable(ConfigError):
    """The configuration file cannot be read. Raised by :func:`config.load_config`."""

    code = "NVSHIM-E0501"


class ConfigMalformed(ConfigError):
    """The configuration file is no TOML. Raised by :func:`config.load_config`."""

    code = "NVSHIM-E0502"


class UnknownConfigKey(ConfigError):
    """A table or key that means nothing to us. Raised by :func:`config.load_config`."""

    code = "NVSHIM-E0503"


class WrongConfigValue(ConfigError):
    """A key's value has the wrong type or is out of range. Raised by :func:`config.load_config`."""

    code = "NVSHIM-E0504"


class CdiError(NvshimError):
    """Something about a CDI spec, or a device of one."""

    code = "NVSHIM-E0600"
    status = Status.FAILED_PRECONDITION
