"""Choose how containers learn of their devices, in a way that the node's engine supports. Pure.

``cdi-cri`` names devices in a field of the CRI. An engine that does not read the field ignores it:
the container starts without a GPU. If the running engine reports that it does not read the field
(:mod:`integration.cri.engine`), or if no engine answers, the response to Allocate also contains the
variable that our shim reads.

Rules
- The response keeps the configured strategies and adds the variable (``envvar``). An engine that is
  upgraded later uses the strategies; having both does no harm.
- If the shim can read a configured strategy anyway, nothing is added.

Source: the kubelet's change 126435: "containerd versions older than v1.7.2 don't support passing
CDI info through CRI"; and :mod:`integration.cri.engine`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

from integration.cri.engine import Engine
from integration.node.values.resources import CDI, PLUGIN, DeviceList, Settings

ENABLE: Final = "nvshim configure containerd --enable-cdi"


class DeliveryMode(NamedTuple):
    """The strategies by which containers learn of their devices."""

    strategies: tuple[DeviceList, ...]  # in each answer to Allocate
    why: str = ""  # why strategies were added to those of the settings; "" if none were


def delivery_mode(settings: Settings, engine: Engine | None) -> DeliveryMode:
    """Return the strategies that reach containers on this node.

    Args:
        engine: the capabilities of the running engine; None if no engine answers.
    """
    configured = settings.device_list_strategies
    if any(_is_read(each, settings, engine) for each in configured):
        return DeliveryMode(configured)
    if engine is None:
        why = "no engine says whether it reads CDI names of the CRI"
    elif engine.reads_cdi is None:
        why = f"{engine} does not say whether it reads CDI names of the CRI"
    else:
        why = f"{engine} does not read CDI names of the CRI, or is not set to"
    return DeliveryMode(_sorted({*configured, DeviceList.ENVVAR}), why)


def _is_read(strategy: DeviceList, settings: Settings, engine: Engine | None) -> bool:
    if strategy not in CDI:
        return True
    if engine is None:
        return False
    is_passed_on = strategy == DeviceList.CDI_ANNOTATIONS and _passes_on(settings, engine)
    return is_passed_on or engine.reads_cdi is True


def _passes_on(settings: Settings, engine: Engine | None) -> bool:
    annotation = f"{settings.cdi_annotation_prefix}{PLUGIN}"
    return engine is not None and engine.hands_on(annotation)


def _sorted(strategies: Collection[DeviceList]) -> tuple[DeviceList, ...]:
    return tuple(each for each in DeviceList if each in strategies)
