"""The files in a kubelet's directory that a shim reads: which pod has which devices.

    root = KubeletRoot(directory)
    root.record(pod_uid, "main", answer)

The files are written as a kubelet writes them: to a temporary file in the same directory, which
then replaces the old one.

Source: tests/recorded/kubernetes-1.36/kubelet.
"""

from __future__ import annotations

import base64
import json
import os
import re
from typing import TYPE_CHECKING, Any, Final

from hooks.requests.kubelet_record import CHECKPOINT, CLAIMS

if TYPE_CHECKING:
    from api.proto import deviceplugin_pb2 as pb

__all__ = ["KubeletRoot"]


class KubeletRoot:
    """A kubelet's directory.

    Args:
        directory: created if missing.
    """

    def __init__(self, directory: str) -> None:
        self.directory: Final = directory
        self._entries: list[dict[str, Any]] = []
        self._claims: list[dict[str, Any]] = []
        os.makedirs(os.path.join(directory, os.path.dirname(CHECKPOINT)), mode=0o750, exist_ok=True)

    def set_in(self, config: str) -> None:
        """Set this directory as ``kubelet-root`` in a shim's configuration file."""
        line = f'kubelet-root = "{self.directory}"\n'
        with open(config, encoding="utf-8") as file:
            before = file.read()
        if line not in before:
            text = re.sub(r"^kubelet-root = .*\n", "", before, flags=re.MULTILINE)
            with open(config, "w", encoding="utf-8") as file:
                file.write(text.replace("[node]\n", f"[node]\n{line}", 1))

    def record(
        self,
        pod: str,
        container: str,
        answer: pb.ContainerAllocateResponse,
        resource: str = "nvidia.com/gpu",
    ) -> None:
        """Record a device plugin's answer for a container."""
        self._entries.append(
            {
                "PodUID": pod,
                "ContainerName": container,
                "ResourceName": resource,
                "DeviceIDs": {"-1": ["an id of the plugin's own"]},
                "AllocResp": base64.b64encode(answer.SerializeToString()).decode(),
            }
        )
        data = {"PodDeviceEntries": self._entries, "RegisteredDevices": {resource: []}}
        self._write(CHECKPOINT, {"Data": data, "Checksum": 1})

    def claim(self, pod: str, *names: str) -> None:
        """Record a claim of a pod, by the CDI names of its devices."""
        device = {"PoolName": "p", "DeviceName": "d", "ShareID": None, "CDIDeviceIDs": list(names)}
        state = {"gpu.example.com": {"Devices": [device]}}
        self._claims.append({"ClaimUID": "1", "PodUIDs": {pod: {}}, "DriverState": state})
        data = {"kind": "DRACheckpoint", "ClaimInfoStateList": self._claims}
        self._write(CLAIMS, {"Data": json.dumps(data), "Checksum": 1})

    def _write(self, name: str, content: object) -> None:
        path = os.path.join(self.directory, name)
        with open(f"{path}.new", "w", opener=_for_root_alone, encoding="utf-8") as file:
            json.dump(content, file, separators=(",", ":"))
        os.rename(f"{path}.new", path)


def _for_root_alone(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
