"""How containers are told what they have, so that the engine of the node hears it. Pure.

``cdi-cri`` names devices in a field of the CRI. An engine that does not read the field leaves it
out without a word: the container begins, and has no GPU. So where the running engine says that it
does not (:mod:`integration.cri.engine`), or none answers, our shim is told as well.

Rules
- What the settings ask for stays in the answer: an engine that comes to read it, does, and to be
  told twice does no harm. The variable is added to it (``envvar``).
- Settings by which the shim is told anyway stay as they are.

Source: the kubelet's change 126435: "containerd versions older than v1.7.2 don't support passing
CDI info through CRI"; and :mod:`integration.cri.engine`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Final, NamedTuple

from integration.node.values.resources import CDI, PLUGIN, DeviceList, Settings

if TYPE_CHECKING:
    from integration.cri.engine import Engine

ENABLE: Final = "nvshim configure containerd --enable-cdi"


class DeliveryMode(NamedTuple):
    """How containers are told what they have."""

    strategies: tuple[DeviceList, ...]  # what answers have
    why: str = ""  # why there are more than the settings ask for; "" if there are not


def delivery_mode(settings: Settings, engine: Engine | None) -> DeliveryMode:
    """How containers are told what they have.

    Args:
        engine: as it says of itself; None if none answers.
    """
    asked = settings.device_list_strategies
    if any(_is_heard(each, settings, engine) for each in asked):
        return DeliveryMode(asked)
    if engine is None:
        why = "no engine says whether it reads CDI names of the CRI"
    elif engine.reads_cdi is None:
        why = f"{engine} does not say whether it reads CDI names of the CRI"
    else:
        why = f"{engine} does not read CDI names of the CRI, or is not set to"
    return DeliveryMode(_sorted({*asked, DeviceList.ENVVAR}), why)


def _is_heard(strategy: DeviceList, settings: Settings, engine: Engine | None) -> bool:
    if strategy not in CDI:
        return True
    if engine is None:
        return False
    is_handed_on = strategy == DeviceList.CDI_ANNOTATIONS and _hands_on(settings, engine)
    return is_handed_on or engine.reads_cdi is True


def _hands_on(settings: Settings, engine: Engine | None) -> bool:
    annotation = f"{settings.cdi_annotation_prefix}{PLUGIN}"
    return engine is not None and engine.hands_on(annotation)


def _sorted(strategies: Collection[DeviceList]) -> tuple[DeviceList, ...]:
    return tuple(each for each in DeviceList if each in strategies)
