"""A container as NRI describes it, as an OCI spec; and edits of a spec, as NRI takes them. Pure.

Rules
- Which pod and container it is, the runtime's own fields say. No annotation that looks like the
  engine's counts, and annotations of the pod are not in the spec: its author writes them.
- NRI does not tell capabilities, so no container is privileged.
- A process cannot be added to a group. So a node that a group of its own may open gets the rights
  of that group for all users of the container, which is whom the shim gives them to.
- A variable that requests GPUs is void afterwards, as CDI specs of NVIDIA's make it: another
  runtime that reads it would inject again.

Source: github.com/containerd/nri pkg/api/api.proto.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from api.proto import nri_pb2 as pb
from hooks.ocispec import Json
from hooks.requests.places import DEVICES, VOID

_KUBERNETES: Final = "io.kubernetes."
_GROUP: Final = 0o070
_OTHERS: Final = 3  # bits from the group's to those of others


def spec_of(pod: pb.PodSandbox, container: pb.Container) -> Json:
    """Return the part of a container's OCI spec that requests, policy and planning read."""
    linux = container.linux
    annotations = {
        name: value
        for name, value in container.annotations.items()
        if not name.startswith(_KUBERNETES)
    }
    return {
        "process": {"env": list(container.env)},
        "annotations": annotations
        | {
            "io.kubernetes.cri.container-type": "container",
            "io.kubernetes.cri.sandbox-uid": pod.uid,
            "io.kubernetes.cri.sandbox-namespace": pod.namespace,
            "io.kubernetes.cri.sandbox-name": pod.name,
            "io.kubernetes.cri.container-name": container.name,
        },
        "mounts": [
            {
                "destination": mount.destination,
                "type": mount.type,
                "source": mount.source,
                "options": list(mount.options),
            }
            for mount in container.mounts
        ],
        "linux": {
            "cgroupsPath": linux.cgroups_path,
            "namespaces": [{"type": each.type, "path": each.path} for each in linux.namespaces],
            "devices": [
                {"path": node.path, "type": node.type, "major": node.major, "minor": node.minor}
                for node in linux.devices
            ],
        },
    }


def adjustment_of(before: Mapping[str, Any], after: Mapping[str, Any]) -> pb.ContainerAdjustment:
    """Return what the engine has added to a spec.

    Args:
        before: of :func:`spec_of`.
        after: the same with the engine's edits, which only add to lists.
    """
    groups = after["process"].get("user", {}).get("additionalGids", ())
    adjustment = pb.ContainerAdjustment(
        mounts=[pb.Mount(**mount) for mount in after["mounts"][len(before["mounts"]) :]]
    )
    variables = after["process"]["env"][len(before["process"]["env"]) :]
    for name, _, value in (entry.partition("=") for entry in (*variables, f"{DEVICES}={VOID}")):
        adjustment.env.add(key=name, value=value)
    for node in after["linux"]["devices"][len(before["linux"]["devices"]) :]:
        mode = node["fileMode"]
        if node["gid"] in groups:
            mode |= (mode & _GROUP) >> _OTHERS
        adjustment.linux.devices.add(
            path=node["path"],
            type=node["type"],
            major=node["major"],
            minor=node["minor"],
            file_mode=pb.OptionalFileMode(value=mode),
            uid=pb.OptionalUInt32(value=node["uid"]),
            gid=pb.OptionalUInt32(value=node["gid"]),
        )
    return adjustment
