"""Taints of devices that no new pod should get, and that go by themselves. Pure.

=================================  ================  ===========================================
taint                              value             of a device
=================================  ================  ===========================================
DRIVER/unhealthy                   ``xid-79``, or    that is not healthy, until it has proven that
                                   the reason        it is (:mod:`integration.node.health.machine`)
DRIVER/lost                        ``no-answer``     that does not answer, or has no node
DRIVER/out-of-service              since when, why   that a person has taken out of service
=================================  ================  ===========================================

Rules
- Their effect is NoSchedule. Pods that have the device are evicted (NoExecute) only where a setting
  says so. A device that is suspect has none: an attribute says it, and it is still given.
- When a taint was added the server says, and it is to say the same for as long as the taint is
  there. So what is written has the time that the server has.

Source: Kubernetes, resource.k8s.io/v1 DeviceTaint.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from integration.node.health.machine import Condition

__all__ = ["EFFECTS", "Taint", "taints_of", "with_times"]

EFFECTS: Final[Mapping[str, str]] = {"taint": "NoSchedule", "evict": "NoExecute", "omit": ""}
"""The effect of taints by what a setting says of devices that are not well; "" for no taints."""

_LONGEST_VALUE: Final = 63
_OTHER: Final = re.compile(r"[^A-Za-z0-9._]+")


class Taint(NamedTuple):
    """A taint, as the API has it."""

    key: str
    value: str
    effect: str  # of EFFECTS


def taints_of(
    conditions: Iterable[Condition],
    driver: str,
    effect: str,
    *,
    lost: bool = False,
    drained: str = "",
) -> tuple[Taint, ...]:
    """Why a device is to be given to no new pod.

    Args:
        conditions: what is thought of it, and of its GPU.
        driver: our name.
        effect: of its taints.
        lost: whether it does not answer, or has no node.
        drained: since when and why it is out of service; "" if it is in service.
    """
    bad = next((each for each in conditions if not each.state.is_given), None)
    why = {}
    if bad is not None:
        why["unhealthy"] = f"xid-{bad.xid}" if bad.xid else bad.reason
    if lost:
        why["lost"] = "no-answer"
    if drained:
        why["out-of-service"] = drained
    return tuple(Taint(f"{driver}/{key}", _value(text), effect) for key, text in why.items())


def with_times(content: dict[str, Any], there: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What a slice has, with the times that the server has of its devices' taints.

    Args:
        content: as :func:`.slices.contents` makes it.
        there: the slices that the server has.
    """
    times = {
        (device["name"], *_key(taint)): taint["timeAdded"]
        for each in there
        for device in each["spec"].get("devices") or ()
        for taint in device.get("basic", device).get("taints") or ()
        if "timeAdded" in taint
    }

    def timed(device: dict[str, Any]) -> dict[str, Any]:
        what = device.get("basic", device)
        if not what.get("taints"):
            return device
        taints = [
            {**taint, **({"timeAdded": times[key]} if key in times else {})}
            for taint in what["taints"]
            for key in [(device["name"], *_key(taint))]
        ]
        what = {**what, "taints": taints}
        return {**device, "basic": what} if "basic" in device else what

    if not content.get("devices"):
        return content
    return {**content, "devices": [timed(device) for device in content["devices"]]}


def _key(taint: Mapping[str, Any]) -> tuple[str, str, str]:
    return taint["key"], taint.get("value", ""), taint["effect"]


def _value(text: str) -> str:
    """A text as the value of a label may be."""
    return _OTHER.sub("-", text)[:_LONGEST_VALUE].strip("-._")
