"""Plans that containers of one image share, kept with a layer that contains their files.

What a container gets, and which files that requires in its image, depends on its request, the node,
the image, and the mounts of its spec. It does not depend on the container's identity. So the files
are created once, as an additional layer of the image, and the plan is kept with them:

- :func:`key_of` returns all dependencies except the image, whose layers the caller knows;
- :class:`Prepared` is the plan, and :meth:`Prepared.encode` its form on disk.

Rules
- A request with other dependencies has no key: CDI devices (their files), hooks of a CDI spec that
  an engine has applied, other vendors' GPUs, features and IMEX channels (host files that are not in
  the inventory), a user namespace.
- The file stores values and no code: the number of each type, and its fields. Damaged bytes are not
  decoded.
- Each container still gets its own check of the node's present state (device nodes, the identity of
  the driver's files) and of the edits of its spec.
"""

from __future__ import annotations

import marshal
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, Final, Self

from api.values import dataclass, replace
from hooks.config import Config
from hooks.edits import applied
from hooks.edits.compat import Compat
from hooks.image.layout import OPTIONS, Layout, Libc, Loader, options_of
from hooks.image.placement import Placed
from hooks.node.inventory import Inventory
from hooks.ocispec import variables_of
from hooks.plan import (
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
from hooks.requests.oci_hooks import calls_of
from hooks.requests.request import Request
from hooks.words import Arch, Void

__all__ = ["Prepared", "key_of"]


def key_of(
    spec: Mapping[str, Any], request: Request, inventory: Inventory | None, config: Config
) -> bytes | None:
    """Return everything that a container's files depend on, except its image.

    Returns:
        Bytes that are equal if all dependencies are; None if there are other dependencies, or if
        the inventory is not cached, because the next container would then get a new one.
    """
    if inventory is None or not inventory.id:
        return None
    if request.features or request.imex_channels != () or request.cdi_devices:
        return None
    if request.amd_devices or request.intel_devices:
        return None
    by_engine = applied.key_of(spec, inventory) if calls_of(spec) else ()
    # Either the engine has applied a CDI spec, or GPUs are requested.
    if by_engine is None or bool(by_engine) is not isinstance(request.devices, Void):
        return None
    mounts, linux = spec.get("mounts") or [], spec.get("linux") or {}
    if not isinstance(mounts, list) or not isinstance(linux, dict):
        return None
    if not all(isinstance(mount, dict) for mount in mounts) or linux.get("uidMappings"):
        return None
    parts = [
        [_plain(getattr(request, name)) for name in Request.__slots__],
        [_plain(getattr(inventory.nodes, name)) for name in inventory.nodes.__match_args__],
        # The id covers the cached part of the inventory. Each container looks up the rest.
        [gpu.drained for gpu in inventory.gpus],
        [device.drained for device in inventory.mig_devices],
        [inventory.id, inventory.sockets, inventory.parameters, inventory.drained],
        config,
        by_engine,
        [_seen(mount) for mount in mounts],
        variables_of(spec).get("LD_LIBRARY_PATH", ""),  # hooks.edits.empty_libraries
    ]
    return repr(parts).encode("utf-8", "surrogateescape")


def _plain(value: object) -> object:
    """Sort a set, whose order differs between processes."""
    return sorted(value) if isinstance(value, frozenset) else value


def _seen(mount: Mapping[str, Any]) -> object:
    """Return what :func:`hooks.image.layout.read_layout` depends on."""
    return mount.get("destination"), mount.get("type"), sorted(options_of(mount) & OPTIONS)


@dataclass(frozen=True, slots=True)
class Prepared:
    """The plan for an image, and what was written into its layer."""

    layout: Layout
    compat: Compat  # the decision about its own libcuda
    plan: Plan  # the edits, without those that each container stages
    placed: Placed  # what is in the layer, and what each container stages

    def with_files(self, mounts: Iterable[Mount]) -> Prepared:
        """Return it with these files in the layer, so that containers do not mount them."""
        return replace(self, placed=replace(self.placed, layered=tuple(mounts)))

    def encode(self) -> bytes:
        """Return its form on disk."""
        return marshal.dumps(_encoded(self))

    @classmethod
    def decode(cls, content: bytes) -> Self | None:
        """Decode what :meth:`encode` has written; None if it is something else."""
        global _last  # noqa: PLW0603 - of a pure function's results, the last
        if _last is None or _last[0] != content:
            _last = content, _kept(content)
        return _last[1] if isinstance(_last[1], cls) else None


# The last result, for containers of one image. A forked process inherits it.
_last: tuple[bytes, Prepared | None] | None = None


def _kept(content: bytes) -> Prepared | None:
    try:
        decoded = _decoded(marshal.loads(content))  # noqa: S302 - of a directory of root's alone
    except (ValueError, TypeError, EOFError, LookupError, RecursionError):
        return None
    return decoded if isinstance(decoded, Prepared) else None


_KINDS: Final[tuple[type, ...]] = (
    Prepared, Layout, Loader, Libc, Arch, Compat, Plan, Placed, Device, Mount, Link, CachedLibrary,
    Missing, File, LinkDirectory, ProcFile,
)  # fmt: skip
_NUMBERS: Final = {kind: number for number, kind in enumerate(_KINDS)}
# In place of a number: a list of values of one kind, whose fields need no check; other values.
_ROWS: Final = -1
_MIXED: Final = -2


def _encoded(value: Any) -> Any:
    """Encode a value as a list of its kind's number and its fields; return others unchanged."""
    if type(value) is tuple:
        return _sequence(value)
    kind = type(value)
    return [_NUMBERS[kind], *_fields(value)] if kind in _NUMBERS else value


def _fields(value: Any) -> list[Any]:
    if isinstance(value, Enum):
        return [value.value]
    return [_encoded(getattr(value, name)) for name in value.__match_args__]


def _sequence(values: tuple[Any, ...]) -> Any:
    kinds = {type(value) for value in values}
    if len(kinds) == 1 and not kinds.isdisjoint(_KINDS):
        rows = [_fields(value) for value in values]
        if not any(type(field) is list for row in rows for field in row):
            return [_ROWS, _NUMBERS[kinds.pop()], rows]
    encoded = tuple(map(_encoded, values))
    return [_MIXED, *encoded] if list in map(type, encoded) else encoded


def _decoded(value: Any) -> Any:
    if type(value) is not list:
        return value
    number, *fields = value
    if number == _ROWS:
        kind, rows = _KINDS[fields[0]], fields[1]
        return tuple([kind(*row) for row in rows])
    fields = [_decoded(field) if type(field) is list else field for field in fields]
    return tuple(fields) if number == _MIXED else _KINDS[number](*fields)
