"""Device metadata (KEP-5304): files that tell containers the attributes of their claims' devices.

For each request of a claim the driver writes two files:

=====================================================  ==========================================
file                                                   what it is
=====================================================  ==========================================
PLUGINS/DRIVER/dra-device-metadata/UID_REQUEST.json    the metadata, as JSON
CDI/DRIVER_metadata_UID_REQUEST.json                   a CDI spec that mounts it, read-only, at
                                                       :func:`container_path`; its device is
                                                       ``DRIVER/metadata=UID_REQUEST``
=====================================================  ==========================================

The answer to the kubelet contains the CDI name together with the first device of the request, so
each container that names the request or the claim gets the mount.

Rules
- The files exist before the kubelet receives the CDI name, and for as long as the claim is
  prepared, since restarted containers need them. The checkpoint records which claims have them;
  without it, the kubelet's record does. That record lacks the pod's name for the claim. Until the
  name is known, an existing spec stays.
- A claim is prepared without metadata if its files cannot be written.
- The content is that of the slice at the time when the claim was prepared, without ``health``,
  which changes. A MIG device that was created for the claim also has its UUID.
- The host's files are named after the claim's UID, because a later claim may have the same name.
  The path in a container consists of names that the API server has checked, except for the
  annotation with the pod's name for the claim (:func:`.claims.read_claim` checks that).

Source: Kubernetes, KEP-5304; dynamic-resource-allocation/kubeletplugin, metadata.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from hooks.config import Config
from hooks.node.kubelet import kubelet_root
from integration.agent_errors import DraStateUnwritten
from integration.cdi.writing import write
from integration.files import read_file, remove_file
from integration.node.services.dra.devices import NVIDIA, Device
from integration.node.values.claims import Claim, ClaimDevice

__all__ = ["directories", "id_of", "is_due", "remove", "requests_of", "sweep", "write_all"]

_VERSION: Final = "metadata.resource.k8s.io/v1alpha1"
_IN_CONTAINER: Final = "/var/run/kubernetes.io/dra-device-attributes"
_UUID: Final = f"{NVIDIA}/uuid"
_SUFFIX: Final = ".json"


def id_of(driver: str, uid: str, request: str) -> str:
    """Return the CDI name that mounts the metadata of a request."""
    return f"{driver}/metadata={uid}_{request}"


def requests_of(claim: Claim) -> dict[str, list[ClaimDevice]]:
    """Return the devices of each request, in the order of the claim."""
    found: dict[str, list[ClaimDevice]] = {}
    for device in claim.devices:
        found.setdefault(device.request, []).append(device)
    return found


def container_path(driver: str, claim: Claim, request: str) -> str:
    """Return where a container finds the metadata of a request."""
    where = f"resourceclaims/{claim.name}"
    if claim.pod_claim:
        where = f"resourceclaimtemplates/{claim.pod_claim}"
    return f"{_IN_CONTAINER}/{where}/{request}/{driver}-metadata.json"


def content_of(
    driver: str, claim: Claim, devices: list[ClaimDevice], known: Mapping[str, Device]
) -> str:
    """Return the metadata of a request.

    Args:
        devices: the devices of the request.
        known: the node's devices, by name.
    """
    name = devices[0].request
    tree: dict[str, Any] = {
        "apiVersion": _VERSION,
        "kind": "DeviceMetadata",
        "metadata": {
            "name": claim.name, "namespace": claim.namespace, "uid": claim.uid, "generation": 1,
        },
        **({"podClaimName": claim.pod_claim} if claim.pod_claim else {}),
        "requests": [
            {
                "name": f"{name}/{devices[0].chosen}" if devices[0].chosen else name,
                "devices": [
                    {
                        "driver": driver, "pool": each.pool, "name": each.device,
                        "attributes": _attributes(each, known),
                    }
                    for each in devices
                ],
            }
        ],
    }  # fmt: skip
    return f"{json.dumps(tree, indent=2)}\n"


def _attributes(device: ClaimDevice, known: Mapping[str, Device]) -> dict[str, Any]:
    if device.device not in known:
        return {}
    attributes = {name: dict(value) for name, value in known[device.device].attributes.items()}
    return attributes | {_UUID: {"string": device.uuid}}


def write_all(config: Config, driver: str, claim: Claim, known: Mapping[str, Device]) -> None:
    """Write the files of all requests of a claim. Blocks.

    Args:
        known: the node's devices, by name.

    Raises:
        CdiSpecUnwritten: a file cannot be written.
    """
    for request, devices in requests_of(claim).items():
        path, spec = _paths(config, driver, claim.uid, request)
        write(path, content_of(driver, claim, devices, known), durable=False)
        write(spec, _spec_of(driver, claim, request, path), durable=False)


def _spec_of(driver: str, claim: Claim, request: str, path: str) -> str:
    """Return the CDI spec of a request; ``path`` is that of its metadata."""
    _, _, name = id_of(driver, claim.uid, request).partition("=")
    mount = {
        "hostPath": path,
        "containerPath": container_path(driver, claim, request),
        "options": ["ro", "bind"],
    }
    tree = {
        "cdiVersion": "0.5.0",  # the first in which a name may start with a digit
        "kind": f"{driver}/metadata",
        "devices": [{"name": name, "containerEdits": {"mounts": [mount]}}],
    }
    return f"{json.dumps(tree)}\n"


def is_due(config: Config, driver: str, claim: Claim) -> bool:
    """Return whether the files of a claim that has metadata must be written again. Blocks."""
    for request in requests_of(claim) if claim.has_metadata else ():
        path, spec = _paths(config, driver, claim.uid, request)
        try:
            found = read_file(spec)
        except OSError:
            return True
        if found is None or not os.path.lexists(path):
            return True
        wanted = _spec_of(driver, claim, request, path).encode()
        if claim.pod_claim is not None and found != wanted:
            return True
    return False


def remove(config: Config, driver: str, uid: str) -> None:
    """Remove the files of a claim, if there are any. Blocks.

    Raises:
        DraStateUnwritten: a file cannot be removed.
    """
    _remove(path for path, owner in _files(config, driver) if owner == uid)


def sweep(config: Config, driver: str, uids: Collection[str]) -> None:
    """Remove all files except those of these claims, and temporary files left by writes.

    Raises:
        DraStateUnwritten: a file cannot be removed.
    """
    _remove(path for path, owner in _files(config, driver) if owner not in uids)


def _remove(paths: Iterator[str]) -> None:
    for path in paths:
        try:
            remove_file(path, durable=False)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise DraStateUnwritten(
                f"to remove {path}", found=error.strerror or str(error)
            ) from error


def directories(config: Config, driver: str) -> tuple[str, ...]:
    """Return the directories that have files of metadata."""
    return tuple(directory for directory, _ in _places(config, driver))


def _places(config: Config, driver: str) -> tuple[tuple[str, str], ...]:
    """Return the directories of the files, each with the prefix of their names; specs last."""
    own = os.path.join(kubelet_root(config), "plugins", driver, "dra-device-metadata")
    return (own, ""), (config.cdi_spec_dirs[-1], f"{driver}_metadata_")


def _paths(config: Config, driver: str, uid: str, request: str) -> tuple[str, ...]:
    """Return the paths of a request's metadata and of its CDI spec."""
    return tuple(
        os.path.join(directory, f"{prefix}{uid}_{request}{_SUFFIX}")
        for directory, prefix in _places(config, driver)
    )


def _files(config: Config, driver: str) -> Iterator[tuple[str, str]]:
    """Yield each file with the UID of its claim, CDI specs first; "" for a part of a write."""
    for directory, prefix in reversed(_places(config, driver)):
        try:
            names = os.listdir(directory)
        except OSError:
            continue  # the directory does not exist
        for name in names:
            if name.startswith(prefix) and name.endswith(_SUFFIX):
                yield os.path.join(directory, name), name.removeprefix(prefix).partition("_")[0]
            elif name.startswith(f".{prefix}"):
                yield os.path.join(directory, name), ""
