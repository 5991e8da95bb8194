"""A container's rootfs with a layer of injected files: connects the engine and the layers.

The engine determines the files' dependencies (:mod:`hooks.prepared`) and writes them. The shim
knows the parts of an overlay (:mod:`shim.rootfs.overlay`), and keeps the layers
(:mod:`shim.work.layers`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import Any, Final

from hooks import engine
from hooks.config import Config
from hooks.engine import Prepared
from hooks.image.rootfs import Rootfs
from hooks.node.inventory import Inventory
from hooks.requests.request import Request
from shim import VERSION
from shim import bundle as bundle_files
from shim.errors import NvshimError
from shim.files import digest
from shim.log import Log
from shim.rootfs.mounts import Mount
from shim.rootfs.overlay import Overlay, read_overlay
from shim.work import driver_files, layers
from shim.work.driver_files import Put
from shim.work.layers import Layer


def prepare(
    bundle: str,
    spec: dict[str, Any],
    rootfs_mounts: Sequence[Mount],
    *,
    request: Request,
    inventory: Inventory,
    config: Config,
    log: Log,
    restored: bool = False,
) -> tuple[Mount, Layer, Prepared] | None:
    """Find the layer that contains a container's files, or create it.

    Args:
        bundle: the container's bundle.
        spec: containerd's OCI spec.
        rootfs_mounts: containerd's mounts for its rootfs.
        request: the container's allowed request.
        inventory: what the node has, with its nodes created.
        config: locates the layers.
        log: gets the cost of a layer's driver files, and why some are missing.

    Returns:
        The mount, the held layer in it, and its decision; None if this container cannot have a
        layer.

    Raises:
        NvshimError: the layer could not be created; nothing is left of it.
        OSError: the layer could not be created; nothing is left of it.
    """
    rootfs = os.path.join(bundle, bundle_files.ROOTFS)
    overlay = read_overlay(rootfs_mounts, fresh=not restored)
    if overlay is None or not _is_root(spec, bundle, rootfs):
        return None
    key = engine.placement_key(spec, request, inventory, config)
    identity = overlay.identity()
    if key is None or identity is None:
        return None

    made: list[tuple[bytes, Prepared]] = []

    def fill(tree: int, top: str) -> bytes:
        with Rootfs(tree) as image:
            prepared, of_driver = engine.prepare(
                spec, request, inventory, image, rootfs=rootfs, config=config
            )
        if of_driver:
            put = driver_files.put(config.layers, top, of_driver)
            prepared = prepared.with_files(put.mounts)
            _tell(log, put, len(of_driver))
        note = prepared.encode()
        made.append((note, prepared))
        return note

    name = layers.name_of(digest(key + _dependencies(overlay, identity)))
    layer = layers.find(config.layers, name)
    if layer is None:
        layer = layers.make(config.layers, name, overlay, fill, inventory.id)
        if layer is None:
            return None
        try:
            layers.collect(config.layers, inventory=inventory.id)
            driver_files.sweep(config.layers)
        except (NvshimError, OSError):
            pass  # the next new layer tries again
    # Another process may have created it with its own note.
    ours = (prepared for note, prepared in made if note == layer.note)
    prepared = next(ours, None) or engine.Prepared.decode(layer.note)
    mount = overlay.with_layer(layer.files)
    if prepared is None or mount is None:
        layer.close()
        return None
    return mount, layer, prepared


def _tell(log: Log, put: Put, wanted: int) -> None:
    if put.copied:
        log.info("driver files were copied for the layers of containers", bytes=put.copied)
    if put.why:
        left = wanted - len(put.mounts)
        log.info("driver files are mounted instead of being in a layer", files=left, why=put.why)


def _dependencies(overlay: Overlay, identity: list[tuple[str, int, int, int]]) -> bytes:
    """Return the dependencies besides the engine's key: our version, the image, its top."""
    top = stat.S_IMODE(overlay.upper.st_mode), overlay.upper.st_uid, overlay.upper.st_gid
    return repr((VERSION, _INSTALLATION, top, identity)).encode("utf-8", "surrogateescape")


def _installation() -> tuple[str, int, int, int]:
    """Return values that distinguish this installation from others of the same version.

    They are its path and when it was unpacked: a file's change time cannot be set.
    """
    place = os.path.dirname(os.path.abspath(__file__))
    status = os.stat(place)
    return place, status.st_dev, status.st_ino, status.st_ctime_ns


# Determined at import: later the installation may be gone.
_INSTALLATION: Final = _installation()


def _is_root(spec: dict[str, Any], bundle: str, rootfs: str) -> bool:
    """Whether the mount at ``rootfs`` is the container's root."""
    root = spec.get("root")
    path = root.get("path") if isinstance(root, dict) else None
    return isinstance(path, str) and os.path.normpath(
        os.path.join(bundle, path)
    ) == os.path.normpath(rootfs)
