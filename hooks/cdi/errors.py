"""The leaves of :class:`hooks.errors.CdiError`.

Codes are never reused::

CdiError  E0600
├── CdiFileUnusable    E0601    ├── CdiResourceMissing  E0606
├── CdiSpecInvalid     E0602    ├── CdiHookRefused      E0607
├── CdiNameMalformed   E0603    ├── CdiHookMalformed    E0608
├── CdiDeviceUnknown   E0604    ├── CdiEditRefused      E0609
├── CdiDeviceConflict  E0605    ├── CdiUnsupported      E0610
└── CdiNotGenerated    E0611
"""

from __future__ import annotations

from api.errors import Status
from hooks.errors import CdiError


class CdiFileUnusable(CdiError):
    """A spec file cannot be read, or others may write it. Raised by :func:`files.read`."""

    code = "NVSHIM-E0601"
    remedy = "correct the file, or remove it; `nvshim cdi validate` says what is wrong"


class CdiSpecInvalid(CdiError):
    """A spec file breaks a rule of the CDI specification. Raised by :func:`schema.parse`."""

    code = "NVSHIM-E0602"


class CdiNameMalformed(CdiError):
    """A device's name is not ``vendor/class=name``. Raised by :func:`spec.parse_name`."""

    code = "NVSHIM-E0603"


class CdiDeviceUnknown(CdiError):
    """No readable spec file has the device. Raised by :meth:`registry.Registry.find`."""

    # Not NOT_FOUND: containerd would take the container for the thing that is missing.
    code = "NVSHIM-E0604"


class CdiDeviceConflict(CdiError):
    """Two files of one directory have the device. Raised by :meth:`registry.Registry.find`."""

    code = "NVSHIM-E0605"


class CdiResourceMissing(CdiError):
    """A device node or file that a spec names is not there. Raised by :mod:`applying`."""

    code = "NVSHIM-E0606"


class CdiHookRefused(CdiError):
    """A spec has a hook that the operator has not allowed. Raised by :mod:`applying`."""

    code = "NVSHIM-E0607"
    status = Status.PERMISSION_DENIED


class CdiHookMalformed(CdiError):
    """A hook of NVIDIA's has arguments of unknown meaning. Raised by :mod:`nvidia_hooks`."""

    code = "NVSHIM-E0608"
    remedy = "make the spec again with the tool that made it"


class CdiEditRefused(CdiError):
    """A spec asks for an edit that no container gets. Raised by :mod:`applying`."""

    code = "NVSHIM-E0609"
    remedy = "correct the CDI spec, or take the device out of the request"


class CdiUnsupported(CdiError):
    """The low-level runtime does not support what a spec needs. Raised by :mod:`applying`."""

    code = "NVSHIM-E0610"
    status = Status.FAILED_PRECONDITION


class CdiNotGenerated(CdiError):
    """The node has nothing that a spec could be made of. Raised by :mod:`generating`."""

    code = "NVSHIM-E0611"


class RuntimeUnasked(CdiError):
    """A spec needs a feature that some low-level runtimes lack, and this one was not asked.

    Raised by :mod:`applying`; a shim can ask.
    """

    code = "NVSHIM-E0612"
    remedy = "name the low-level runtime in the handler's options (BinaryName)"
