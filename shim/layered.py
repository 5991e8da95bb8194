"""A container's rootfs with a layer of what it is given: between the engine and the layers.

The engine knows on what the files depend (:mod:`hooks.prepared`) and writes them; what an overlay
is made of (:mod:`shim.overlay`) and how layers live (:mod:`shim.layers`) it does not know.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Any, Final

from hooks import engine
from hooks.image.rootfs import Rootfs
from shim import VERSION, layers
from shim import bundle as bundle_files
from shim.address import digest
from shim.errors import NvshimError
from shim.overlay import read_overlay

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hooks.config import Config
    from hooks.engine import Prepared
    from hooks.node.inventory import Inventory
    from hooks.requests.request import Request
    from shim.layers import Layer
    from shim.mounts import Mount
    from shim.overlay import Overlay


def prepare(
    bundle: str,
    spec: dict[str, Any],
    rootfs_mounts: Sequence[Mount],
    *,
    request: Request,
    inventory: Inventory,
    config: Config,
) -> tuple[Mount, Layer, Prepared] | None:
    """Find the layer that a container's files are in, or make it.

    Args:
        bundle: the container's bundle.
        spec: the OCI spec as containerd wrote it.
        rootfs_mounts: what containerd wants mounted as its rootfs.
        request: what is to be given.
        inventory: what the node has, its nodes made.
        config: where layers are.

    Returns:
        What is to be mounted, the layer in it, which is held, and what was decided with it; None
        if this container has none.

    Raises:
        NvshimError: the layer could not be made; nothing is left of it.
        OSError: likewise.
    """
    rootfs = os.path.join(bundle, bundle_files.ROOTFS)
    overlay = read_overlay(rootfs_mounts)
    if overlay is None or not _is_root(spec, bundle, rootfs):
        return None
    key = engine.placement_key(spec, request, inventory, config)
    identity = overlay.identity()
    if key is None or identity is None:
        return None

    def fill(tree: int) -> bytes:
        with Rootfs(tree) as image:
            prepared = engine.prepare(spec, request, inventory, image, rootfs=rootfs, config=config)
        return prepared.encode()

    name = layers.name_of(digest(key + _surroundings(overlay, identity)))
    layer = layers.find(config.layers, name)
    if layer is None:
        layer = layers.make(config.layers, name, overlay, fill)
        if layer is None:
            return None
        try:
            layers.collect(config.layers)
        except (NvshimError, OSError):
            pass  # whoever makes the next one tries again
    return _used(overlay, layer)


def _used(overlay: Overlay, layer: Layer) -> tuple[Mount, Layer, Prepared] | None:
    prepared = engine.Prepared.decode(layer.note)
    mount = overlay.with_layer(layer.files)
    if prepared is None or mount is None:
        layer.close()
        return None
    return mount, layer, prepared


def _surroundings(overlay: Overlay, identity: list[tuple[str, int, int, int]]) -> bytes:
    """What files depend on besides the engine's key: who makes them, where and upon what."""
    top = stat.S_IMODE(overlay.upper.st_mode), overlay.upper.st_uid, overlay.upper.st_gid
    return repr((VERSION, _INSTALLATION, top, identity)).encode("utf-8", "surrogateescape")


def _installation() -> tuple[str, int, int, int]:
    """What tells this installation from another one of the same version.

    Where it is, and when it was put there: what is unpacked at the same place later has another
    time of change, which nobody can set.
    """
    place = os.path.dirname(os.path.abspath(__file__))
    status = os.stat(place)
    return place, status.st_dev, status.st_ino, status.st_ctime_ns


# As it was when this was loaded: it may have gone when it is asked for.
_INSTALLATION: Final = _installation()


def _is_root(spec: dict[str, Any], bundle: str, rootfs: str) -> bool:
    """Whether what is mounted at ``rootfs`` is what the container will see as its root."""
    root = spec.get("root")
    path = root.get("path") if isinstance(root, dict) else None
    return isinstance(path, str) and os.path.normpath(
        os.path.join(bundle, path)
    ) == os.path.normpath(rootfs)
