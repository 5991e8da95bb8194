"""What can be wrong with how a container asks; leaves of :class:`hooks.errors.RequestError`."""

from __future__ import annotations

from hooks.errors import RequestError

__all__ = ["AmbiguousDevice", "MalformedChannel", "MalformedMigAccess", "TooManyDevices"]


class AmbiguousDevice(RequestError):
    """The beginning of a UUID is that of several devices. Raised by :func:`grant.decide`."""

    code = "NVSHIM-E0205"


class TooManyDevices(RequestError):
    """A list names more devices than any node has. Raised by :func:`names.parse_names`."""

    code = "NVSHIM-E0206"


class MalformedChannel(RequestError):
    """An IMEX channel is no number of one. Raised by :func:`names.parse_channels`."""

    code = "NVSHIM-E0207"


class MalformedMigAccess(RequestError):
    """NVIDIA_MIG_CONFIG_DEVICES or _MONITOR_DEVICES has another value than ``all``.

    Raised by :func:`request.read_request`.
    """

    code = "NVSHIM-E0208"
