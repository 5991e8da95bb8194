"""Whether the engine hears what the kubelet hands on to it. Pure.

``cdi-cri`` names devices in a field of the CRI. An engine that does not know the field, or is not
to heed it, leaves it out without a word: the container begins, and has no GPU.

===============================  =================================================================
containerd                       what becomes of the field
===============================  =================================================================
before 1.7.2                     it is not known
before 2.0                       it is heeded where ``enable_cdi`` is set, which it is not by itself
since 2.0                        it is heeded, unless ``enable_cdi`` is set to false
===============================  =================================================================

Annotations are heard there as well; elsewhere by our shim, if containerd hands them on to it.

Source: containerd docs/cri/config.md, pull requests 6654 and 8519; the kubelet's change 126435:
"containerd versions older than v1.7.2 don't support passing CDI info through CRI".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from integration.node.plugin.values import DeviceList

if TYPE_CHECKING:
    from collections.abc import Collection

    from integration.doctor.facts import Containerd

__all__ = ["BESIDE", "ENABLE", "Unheard", "unheard", "unheard_by"]

BESIDE: Final = "--device-list-strategy envvar,cdi-cri"
"""What has containers get their devices from our shim too."""

ENABLE: Final = "nvshim configure containerd --enable-cdi"

_FIRST_WITH_FIELD: Final = (1, 7, 2)
_VARIABLES: Final = frozenset({DeviceList.ENVVAR, DeviceList.VOLUME_MOUNTS})


class Unheard(NamedTuple):
    """Why containers do not get what they are given.

    Attributes:
        found: what is there.
        remedy: what to do.
        command: what to type; "" if that needs more than one command.
    """

    found: str
    remedy: str
    command: str = ""


def _release_of(version: str) -> tuple[int, ...]:
    """A version's numbers; none if it is not known."""
    parts = version.split(".")
    return tuple(map(int, parts)) if all(p.isascii() and p.isdecimal() for p in parts) else ()


def unheard(
    strategies: Collection[str], version: str, *, heeds_cdi: bool, hands_annotations_on: bool
) -> Unheard | None:
    """See whether containers get their devices.

    Args:
        strategies: how they are told what they have.
        version: of containerd; "" if that is not known.
        heeds_cdi: whether ``enable_cdi`` is in force.
        hands_annotations_on: whether our shim gets annotations of containers.

    Returns:
        Why they do not; None if they do, or nothing is to be given by CDI.
    """
    if not strategies or not _VARIABLES.isdisjoint(strategies):
        return None
    if DeviceList.CDI_ANNOTATIONS in strategies and (hands_annotations_on or heeds_cdi):
        return None
    told = f"containers are told of their GPUs by {', '.join(sorted(strategies))} alone"
    release = _release_of(version)
    if release and release < _FIRST_WITH_FIELD:
        return Unheard(
            f"{told}, and containerd {version} does not know that",
            f"run the node agent with {BESIDE}, or update containerd to 2.0 or later",
        )
    if heeds_cdi:
        return None
    which = f"containerd {version}" if version else "containerd"
    return Unheard(
        f"{told}, and {which} does not heed it: enable_cdi is not set",
        f"set it, and restart containerd; or run the node agent with {BESIDE}",
        ENABLE,
    )


def unheard_by(containerd: Containerd, strategies: Collection[str]) -> Unheard | None:
    """See whether containers of a containerd get their devices.

    Args:
        containerd: as it was seen; one that does not run, or serves no kubelet, is not judged.
        strategies: how containers are told what they have.
    """
    if not containerd.pid or not containerd.cri:
        return None
    return unheard(
        strategies,
        containerd.version,
        heeds_cdi=containerd.enable_cdi,
        hands_annotations_on=any(handler.annotations for handler in containerd.handlers),
    )
