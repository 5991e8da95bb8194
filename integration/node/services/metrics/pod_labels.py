"""Labels of the pods that hold devices, for dcgm-exporter's series.

Rules
- The options name the labels. In the series they have no prefix, and an underscore for each
  character that is not valid in a Prometheus label. A label that the series already have is not
  replaced.
- The container engine reports the labels of its own node's pods, so the agent needs no permission
  in the cluster. They are the labels with which the pod started: later changes are not seen.
- Only a scrape asks the engine, and only if it finds a pod that was not asked for yet.

Source: CRI v1 ListPodSandbox; dcgm-exporter, internal/pkg/transformation.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Final

from integration.detached import run_detached
from integration.kubelet.sockets import socket_identity
from integration.node.services.metrics.snapshot import Labels

_TIMEOUT: Final = 0.8  # seconds, less than a scrape waits for it
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_]|^(?=[0-9])")


class PodLabels:
    """Asks the engine for labels of pods.

    Args:
        keys: the labels, by their keys in Kubernetes.
        taken: labels that the series already have.
        sockets: the possible sockets of engines; the first that answers counts.

    Attributes:
        names: the names of the labels in metrics, in the order of their values.
    """

    def __init__(self, keys: Sequence[str], taken: Collection[str], sockets: Sequence[str]) -> None:
        self._keys: dict[str, str] = {}  # by the names
        for key in keys:
            name = _NOT_IN_NAMES.sub("_", key)
            if name not in taken:
                self._keys.setdefault(name, key)
        self.names: Final = tuple(self._keys)
        self._sockets = sockets
        self._known: dict[str, Labels] = {}

    async def of(self, pods: Collection[str]) -> Mapping[str, Labels]:
        """Return the values of the pods' labels by UID, without pods that are unknown.

        Args:
            pods: the UIDs of the pods.
        """
        if not self._known.keys() >= {*pods}:
            told = await run_detached(_ask, self._sockets)
            if told is not None:
                self._known = {uid: self._values(told.get(uid, {})) for uid in pods}
        return self._known

    def _values(self, told: Mapping[str, str]) -> Labels:
        return tuple(told.get(key, "") for key in self._keys.values())


def _ask(sockets: Sequence[str]) -> dict[str, dict[str, str]] | None:
    """Return the labels of all pods by UID; None if no engine answers."""
    # An agent without a kubelet, and so without pods, need not import gRPC.
    from api.proto import cri_pb2 as pb  # noqa: PLC0415
    from integration.cri.client import Cri  # noqa: PLC0415
    from integration.cri.errors import CriError  # noqa: PLC0415

    for path in sockets:
        if socket_identity(path) is not None:
            with Cri(path) as cri, suppress(CriError):
                answer = cri.list_pod_sandbox(pb.ListPodSandboxRequest(), timeout=_TIMEOUT)
                return {pod.metadata.uid: dict(pod.labels) for pod in answer.items}
    return None
