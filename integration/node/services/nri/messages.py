"""Translate NRI's description of a container to an OCI spec, and edits of a spec back. Pure.

Rules
- The runtime's own fields tell which pod and container it is. Annotations that look like the
  engine's do not count, and the pod's annotations are not put into the spec: the pod's author
  writes them.
- NRI does not report capabilities, so no container counts as privileged.
- A process cannot be added to a group. So if a group may open a node, all users of the container
  get the rights of that group. The shim gives access to the same users.
- A variable that requests GPUs is set to void afterwards, as in NVIDIA's CDI specs, because another
  runtime that reads it would inject the devices again.

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
_OTHERS: Final = 3  # the shift from the group's permission bits to those of others


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
        before: the spec, as :func:`spec_of` returned it.
        after: the same spec with the engine's edits, which only add to lists.
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
