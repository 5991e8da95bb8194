"""What is decided for an image once, and for every container that asks the same of it.

What a container is given, and which files that takes in its image, depends on its request, on
the node, on the image, and on where its spec mounts something. Nothing of it depends on which
container it is. So the files can be made once, as one more layer of the image, and what was
decided can be kept beside them:

- :func:`key_of` says on what it depends, but for the image, whose layers the caller knows;
- :class:`Prepared` is what was decided, and :meth:`Prepared.encode` its form on disk.

Rules
- What could depend on more has no key: CDI devices (their files), other vendors' GPUs, features
  and IMEX channels (files of the host that no inventory knows), a user namespace.
- Only values are kept, no code: rows of a table for each kind of edit. What is damaged does not
  decode.
- What has to be true of the node at this moment (device nodes, the identity of the driver's files)
  is looked at for each container, and what is given to it is verified for each container.
"""

from __future__ import annotations

import marshal
from typing import TYPE_CHECKING, Any, Final, Self

from api.values import value
from hooks.edits.plan import (
    Arch,
    CachedLibrary,
    Device,
    File,
    Link,
    LinkDirectory,
    Missing,
    Mount,
    Plan,
    ProcFile,
)
from hooks.image.compat import Compat
from hooks.image.layout import Layout, Libc, Loader
from hooks.image.placement import Inside
from hooks.requests.request import Request, Void

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hooks.config import Config
    from hooks.node.inventory import Inventory

__all__ = ["Prepared", "key_of"]

FORMAT: Final = 3
"""Of what is kept, and of what is decided: to be raised when the same request, node and image
give other files or other edits than before."""

_ROWS: Final[dict[str, type]] = {
    "devices": Device,
    "mounts": Mount,
    "links": Link,
    "libraries": CachedLibrary,
    "missing": Missing,
    "files": File,
    "link_directories": LinkDirectory,
    "proc_files": ProcFile,
}
# Of an inventory: with a set in it; and what says nothing of the node.
_APART: Final = ("nodes", "kept")
_PLAIN: Final = ("environment", "additional_gids", "library_directories", "first_directories")


def key_of(
    spec: Mapping[str, Any], request: Request, inventory: Inventory | None, config: Config
) -> bytes | None:
    """On what a container's files depend besides its image.

    Args:
        spec: config.json, decoded.
        request: what is to be given.
        inventory: what the node has, as it is now.
        config: how it is decided.

    Returns:
        Bytes that are the same if all of it is the same; None if it depends on more.
    """
    if inventory is None or isinstance(request.devices, Void) or not request.wants_driver:
        return None
    if request.features or request.imex_channels != () or request.cdi_devices:
        return None
    if request.amd_devices or request.intel_devices:
        return None
    mounts, linux = spec.get("mounts") or [], spec.get("linux") or {}
    if not isinstance(mounts, list) or not isinstance(linux, dict):
        return None
    if not all(isinstance(mount, dict) for mount in mounts) or linux.get("uidMappings"):
        return None
    parts = [
        FORMAT,
        [_plain(getattr(request, name)) for name in Request.__slots__],
        [getattr(inventory, name) for name in inventory.__match_args__ if name not in _APART],
        [_plain(getattr(inventory.nodes, name)) for name in inventory.nodes.__match_args__],
        config,
        [_seen(mount) for mount in mounts],
    ]
    return repr(parts).encode("utf-8", "surrogateescape")


def _plain(value: object) -> object:
    """A set has no order that would be the same in every process."""
    return sorted(value) if isinstance(value, frozenset) else value


def _seen(mount: Mapping[str, Any]) -> object:
    """What an image's layout depends on: :func:`hooks.image.layout.read_layout`."""
    options = mount.get("options")
    read_only = isinstance(options, list) and "ro" in options
    return mount.get("destination"), mount.get("type"), read_only


@value
class Prepared:
    """What was decided for an image, and done in a layer of it.

    Attributes:
        layout: what the image looks like.
        compat: what was decided of its own libcuda.
        plan: the edits, without those that have to be staged for each container.
        inside: what is in the layer, and what is to be staged.
    """

    layout: Layout
    compat: Compat
    plan: Plan
    inside: Inside

    def encode(self) -> bytes:
        """Its form on disk."""
        plan, layout, compat, inside = self.plan, self.layout, self.compat, self.inside
        return marshal.dumps(
            (
                FORMAT,
                [_row(loader) for loader in layout.loaders],
                (layout.has_cache, layout.covered, tuple(sorted(layout.fresh))),
                (compat.directory, compat.why, compat.version),
                _rows(compat.libraries),
                {name: _rows(getattr(plan, name)) for name in _ROWS},
                [getattr(plan, name) for name in _PLAIN],
                (inside.written, inside.omitted),
                [(over, isinstance(edit, File), _row(edit)) for over, edit in inside.mounted],
            )
        )

    @classmethod
    def decode(cls, content: bytes) -> Self | None:
        """What :meth:`encode` has written; None if this is not it.

        Args:
            content: what was kept.
        """
        try:
            version, *rest = marshal.loads(content)  # noqa: S302 - of a directory of root's alone
            return cls(*_decoded(rest)) if version == FORMAT else None
        except (ValueError, TypeError, EOFError, KeyError):
            return None


def _decoded(parts: Any) -> tuple[Layout, Compat, Plan, Inside]:
    loaders, image, compat, compat_libraries, rows, plain, inside, mounted = parts
    has_cache, covered, fresh = image
    directory, why, compat_version = compat
    written, omitted = inside
    layout = Layout(
        loaders=tuple(
            Loader(Arch(arch), Libc(libc), directory, searched)
            for arch, libc, directory, searched in loaders
        ),
        has_cache=has_cache,
        covered=covered,
        fresh=frozenset(fresh),
    )
    edits = {name: _all_made(kind, rows[name]) for name, kind in _ROWS.items()}
    return (
        layout,
        Compat(directory, why, compat_version, _all_made(CachedLibrary, compat_libraries)),
        Plan(**edits, **dict(zip(_PLAIN, plain, strict=True))),
        Inside(
            written,
            omitted,
            tuple(
                (over, _made(File if is_file else LinkDirectory, row))
                for over, is_file, row in mounted
            ),
        ),
    )


def _rows(values: Iterable[Any]) -> list[tuple[Any, ...]]:
    return [_row(value) for value in values]


def _row(value: Any) -> tuple[Any, ...]:
    fields = [getattr(value, name) for name in value.__match_args__]
    return tuple(field.value if isinstance(field, Arch | Libc) else field for field in fields)


def _all_made(kind: type, rows: Iterable[tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple(_made(kind, row) for row in rows)


def _made(kind: type, row: tuple[Any, ...]) -> Any:
    if kind is CachedLibrary:
        soname, path, arch = row
        return CachedLibrary(soname, path, Arch(arch))
    return kind(*row)
