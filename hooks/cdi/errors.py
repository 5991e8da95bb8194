"""The errors of CDI specs: E06xx. Codes are never reused."""

from __future__ import annotations

from api.errors import Status
from hooks.errors import CdiError


class CdiFileUnusable(
    CdiError,
    code="NVSHIM-E0601",
    remedy="correct the file, or remove it; `nvshim cdi validate` says what is wrong",
):
    """A spec file cannot be read, or others may write it. Raised by :func:`files.read`."""


class CdiSpecInvalid(CdiError, code="NVSHIM-E0602"):
    """A spec file breaks a rule of the CDI specification. Raised by :func:`schema.parse`."""


# Not NOT_FOUND, which containerd would read as a missing container.
class CdiDeviceUnknown(CdiError, code="NVSHIM-E0604"):
    """No readable spec file has the device. Raised by :meth:`registry.Registry.find`."""


class CdiNotGenerated(CdiError, code="NVSHIM-E0611"):
    """The node has no device to generate a spec for. Raised by :mod:`generating`."""


# fmt: off
CdiNameMalformed = CdiError.row("NVSHIM-E0603 cdi-name-malformed", Status.FAILED_PRECONDITION,
    "A device's name is not ``vendor/class=name``.")
CdiDeviceConflict = CdiError.row("NVSHIM-E0605 cdi-device-conflict", Status.FAILED_PRECONDITION,
    "Two files of one directory have the device.")
CdiResourceMissing = CdiError.row("NVSHIM-E0606 cdi-resource-missing", Status.FAILED_PRECONDITION,
    "A device node or file that a spec names does not exist.")
CdiHookRefused = CdiError.row("NVSHIM-E0607 cdi-hook-refused", Status.PERMISSION_DENIED,
    "A spec contains a hook that the operator has not allowed.")
CdiHookMalformed = CdiError.row("NVSHIM-E0608 cdi-hook-malformed", Status.FAILED_PRECONDITION,
    "One of NVIDIA's hooks has unknown arguments.",
    remedy="make the spec again with the tool that made it")
CdiEditRefused = CdiError.row("NVSHIM-E0609 cdi-edit-refused", Status.FAILED_PRECONDITION,
    "A spec requests an edit that is not allowed for any container.",
    remedy="correct the CDI spec, or take the device out of the request")
CdiUnsupported = CdiError.row("NVSHIM-E0610 cdi-unsupported", Status.FAILED_PRECONDITION,
    "The low-level runtime does not support what a spec needs.")
RuntimeUnasked = CdiError.row("NVSHIM-E0612 runtime-unasked", Status.FAILED_PRECONDITION,
    "A spec needs a feature that some low-level runtimes lack, and this one could not be asked.",
    remedy="name the low-level runtime in the handler's options (BinaryName)")
