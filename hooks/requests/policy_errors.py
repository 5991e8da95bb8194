"""What a container may not have, or its image cannot use; leaves of :class:`RequestError`.

::

    RequestError    E0200   (hooks.errors)
    ├── RequestDenied         E0221    ├── RequirementUnmet      E0225
    ├── GpuExcluded           E0222    ├── RequirementUnclear    E0226
    ├── PrivilegeNeeded       E0223    ├── MalformedRequirement  E0227
    ├── UnsupportedCapability E0224    └── DeviceHeld            E0228
    └── ClaimsUnusable        E0229
"""

from __future__ import annotations

from api.errors import Status
from hooks.errors import RequestError

__all__ = [
    "ClaimsUnusable",
    "DeviceHeld",
    "GpuExcluded",
    "MalformedRequirement",
    "PrivilegeNeeded",
    "RequestDenied",
    "RequirementUnclear",
    "RequirementUnmet",
    "UnsupportedCapability",
]


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
    """MIG is to be steered by a container without CAP_SYS_ADMIN. Raised by :func:`policy.judge`."""

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
    status = Status.FAILED_PRECONDITION


class RequirementUnclear(RequestError):
    """Whether the image's needs are met hangs on what NVML alone knows, and did not say.

    Raised by :func:`check_requirements`.
    """

    code = "NVSHIM-E0226"
    status = Status.FAILED_PRECONDITION


class MalformedRequirement(RequestError):
    """NVIDIA_REQUIRE_* has what is no requirement. Raised by :func:`check_requirements`."""

    code = "NVSHIM-E0227"


class DeviceHeld(RequestError):
    """As many containers have a device as may have it. Raised by :mod:`shim.claims`."""

    code = "NVSHIM-E0228"
    status = Status.RESOURCE_EXHAUSTED


class ClaimsUnusable(RequestError):
    """Who has which device cannot be written down, and there is a limit to it.

    Raised by :mod:`shim.claims`.
    """

    code = "NVSHIM-E0229"
    status = Status.FAILED_PRECONDITION
