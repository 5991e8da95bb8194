"""Read the settings that a running engine uses, which may differ from its files.

An engine reads its configuration when it starts, and reports it in the CRI's verbose Status. These
settings decide whether a pod gets its handler and its GPUs.

Rules
- A setting that an engine does not report is None: unknown.
- containerd reports its settings in JSON, under other names (``runtimeType``,
  ``ContainerAnnotations``, ``enableCDI``) than in its files (``runtime_type``, …). They are
  compared without case and underscores, and an empty value counts as missing.

==============  ================================================================================
containerd      CDI names in a CRI request
==============  ================================================================================
before 1.7.2    are ignored
before 2.0      are used if ``enable_cdi`` is set; the default is off
since 2.0       are used unless ``enable_cdi`` is set to false
==============  ================================================================================

Every CRI-O that supports CDI uses them.

Source: CRI v1 Version, Status (verbose); containerd internal/cri/server/status.go, docs/cri/
config.md, pull requests 6654 and 8519.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from api.values import dataclass, field
from integration.handlers import calls_our_shim
from integration.json_documents import parse_json

if TYPE_CHECKING:  # callers of the CRI need protobuf; users of these names do not
    from api.proto import cri_pb2 as pb

CRI_SOCKETS: Final = (
    "/run/containerd/containerd.sock",
    "/run/k3s/containerd/containerd.sock",
    "/run/k0s/containerd.sock",
    "/var/snap/microk8s/common/run/containerd.sock",
    "/run/crio/crio.sock",
)
"""The sockets of engines: packages; k3s and RKE2; k0s; MicroK8s; CRI-O."""

CONTAINERD: Final = "containerd"
CRIO: Final = "cri-o"
_FIRST_WITH_NAMES: Final = (1, 7, 2)
_RELEASE: Final = re.compile(r"v?(\d+)\.(\d+)\.(\d+)", re.ASCII)
# The parts of a configuration, which may be long, that are compared.
_TOLD: Final = ("enableCDI", "containerd")
_OPTIONS: Final = "options"


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine."""

    name: str  # "containerd", "cri-o"
    version: str  # as it reports it ("2.1.9", "1.7.24~ds1")
    # the compared parts of its configuration; empty if unknown
    config: Mapping[str, Any] = field(default_factory=dict)
    handlers: tuple[str, ...] = ()  # the names of its handlers; () if it is too old to list them

    def __str__(self) -> str:
        """Return its name and version, for messages."""
        return f"{self.name} {self.version}".strip()

    @property
    def release(self) -> tuple[int, ...]:
        """The version's numbers; () if unknown."""
        found = _RELEASE.match(self.version)
        return tuple(map(int, found.groups())) if found else ()

    @property
    def reads_cdi(self) -> bool | None:
        """Whether it uses the CDI names in the kubelet's requests; None if unknown."""
        if self.name == CRIO:
            return True
        if self.name != CONTAINERD or not self.release:
            return None
        if self.release < _FIRST_WITH_NAMES:
            return False
        is_set = self.config.get("enableCDI") if self.config else None
        return is_set if isinstance(is_set, bool) else None

    def hands_on(self, annotation: str) -> bool:
        """Return whether a handler of our shim gets a container annotation."""
        return any(
            fnmatch.fnmatchcase(annotation, pattern)
            for handler in self._runtimes.values()
            if isinstance(handler, dict)
            and calls_our_shim(handler.get("runtimeType"), handler.get("runtimePath"))
            for pattern in handler.get("ContainerAnnotations") or ()
            if isinstance(pattern, str)
        )

    def handler(self, name: str) -> Mapping[str, Any]:
        """Return a handler's settings, under the engine's names; empty if unknown."""
        return _table(self._runtimes.get(name))

    @property
    def _runtimes(self) -> Mapping[str, Any]:
        return _table(_table(self.config.get("containerd")).get("runtimes"))

    def lacks(self, wanted: Mapping[str, Any]) -> list[str] | None:
        """Return which wanted settings are not in effect.

        Args:
            wanted: settings of the CRI plugin, by their names in containerd's files
                (``enable_cdi``, and ``runtimes`` in ``containerd``).

        Returns:
            The settings, for messages; None if unknown.
        """
        if self._runtimes:
            return list(_differences(wanted, self.config))
        names = wanted.get("containerd", {}).get("runtimes", {})
        if self.handlers:
            return [f"the handler {name}" for name in names if name not in self.handlers]
        return None


def engine_of(version: pb.VersionResponse, status: pb.StatusResponse) -> Engine:
    """Build an engine from its answers.

    Args:
        version: its answer to Version.
        status: its answer to a verbose Status.
    """
    try:
        told = parse_json(status.info.get("config", "null"))
    except ValueError:
        told = None
    config = {key: told[key] for key in _TOLD if key in told} if isinstance(told, dict) else {}
    handlers = tuple(handler.name for handler in status.runtime_handlers)
    return Engine(version.runtime_name, version.runtime_version, config, handlers)


def _differences(wanted: Mapping[str, Any], there: Any, *path: str) -> Iterator[str]:
    """Yield the settings that differ; a handler's options are compared as a whole."""
    found = {_key(key): value for key, value in _table(there).items()}
    for key, value in wanted.items():
        now = found.get(_key(key))
        if isinstance(value, dict) and key != _OPTIONS:
            yield from _differences(value, now, *path, key)
        elif _plain(now) != _plain(value):
            yield f"{'.'.join((*path, key))} = {json.dumps(value)}"


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _key(key: str) -> str:
    return key.replace("_", "").lower()


def _plain(value: Any) -> Any:
    """Return a value without its empty parts, which containerd treats as missing."""
    if not isinstance(value, dict):
        return value or None
    items = ((_key(key), _plain(each)) for key, each in value.items())
    return {key: each for key, each in items if each is not None} or None
