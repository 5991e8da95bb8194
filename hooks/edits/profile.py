"""The application profile that shows EGL and Vulkan the GPUs of a container, and no others.

Without it they enumerate every GPU that procfs lists, try those that have no node here, and
fail or take seconds. The profile's setting is a mask of the minors of GPUs; the driver reads
each file of /etc/nvidia/nvidia-application-profiles-rc.d.

A minor beyond the mask cannot be shown, so for a container that has such a GPU no profile is
made: one without it would hide a GPU that was granted.

Source: the driver's README, "Application Profiles", EGLVisibleDGPUDevices; libnvidia-container,
src/nvc_mount.c.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hooks.edits.plan import File

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["PATH", "application_profile"]

PATH: Final = "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf"
_BITS: Final = 64

_CONTENT: Final = """\
{{"profiles": [{{"name": "_container_", "settings": ["EGLVisibleDGPUDevices", {mask:#x}]}}],
 "rules": [{{"pattern": [], "profile": "_container_"}}]}}
"""


def application_profile(minors: Iterable[int]) -> File | None:
    """The profile for a container with GPUs.

    Args:
        minors: of the GPUs' nodes that it has.

    Returns:
        The file; None if there is no GPU, or one that no mask can show.
    """
    shown = frozenset(minors)
    if not shown or max(shown) >= _BITS:
        return None
    mask = sum(1 << minor for minor in shown)
    return File(PATH, _CONTENT.format(mask=mask).encode(), reason="shows EGL the granted GPUs")
