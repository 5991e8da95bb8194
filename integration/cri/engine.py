"""What an engine says of itself: the settings that it was started with, not those in its files.

An engine reads its configuration when it starts, and tells it in the CRI's Status, if that is asked
for more words. So whoever needs to know whether a pod gets its handler or its GPUs asks here.

Rules
- Nothing is concluded from silence: what an engine does not tell is None.
- containerd tells its settings in JSON, under names of its own (``runtimeType``,
  ``ContainerAnnotations``, ``enableCDI``) for those of its files (``runtime_type``, …). They are
  compared without case and underscores, and what is empty counts as not there.

==============  ================================================================================
containerd      what becomes of CDI names in a request of the CRI
==============  ================================================================================
before 1.7.2    they are not read
before 2.0      they are read where ``enable_cdi`` is set, which it is not by itself
since 2.0       they are read, unless ``enable_cdi`` is set to false
==============  ================================================================================

CRI-O has always read them since it knows CDI.

Source: CRI v1 Version, Status (verbose); containerd internal/cri/server/status.go, docs/cri/
config.md, pull requests 6654 and 8519.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from integration.handlers import calls_our_shim
from integration.json_documents import parse_json

if TYPE_CHECKING:
    from api.proto import cri_pb2 as pb

CRI_SOCKETS: Final = (
    "/run/containerd/containerd.sock",
    "/run/k3s/containerd/containerd.sock",
    "/run/k0s/containerd.sock",
    "/var/snap/microk8s/common/run/containerd.sock",
    "/run/crio/crio.sock",
)
"""Where engines serve kubelets, by who starts them: packages, k3s, RKE2; k0s; MicroK8s; CRI-O."""

CONTAINERD: Final = "containerd"
CRIO: Final = "cri-o"
_FIRST_WITH_NAMES: Final = (1, 7, 2)
_RELEASE: Final = re.compile(r"v?(\d+)\.(\d+)\.(\d+)", re.ASCII)
# Of a configuration, which may be long, what somebody compares.
_TOLD: Final = ("enableCDI", "containerd")
_OPTIONS: Final = "options"


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine."""

    name: str  # "containerd", "cri-o"
    version: str  # as it says it ("2.1.9", "1.7.24~ds1")
    # of its configuration, what is compared; empty if it does not tell
    config: Mapping[str, Any] = field(default_factory=dict)
    handlers: tuple[str, ...] = ()  # the names of its handlers; none if it is too old to list them

    def __str__(self) -> str:
        """Its name and version, for people."""
        return f"{self.name} {self.version}".strip()

    @property
    def release(self) -> tuple[int, ...]:
        """The version's numbers; none if it is not known."""
        found = _RELEASE.match(self.version)
        return tuple(map(int, found.groups())) if found else ()

    @property
    def reads_cdi(self) -> bool | None:
        """Whether it gives containers the CDI devices that the kubelet names; None if unknown."""
        if self.name == CRIO:
            return True
        if self.name != CONTAINERD or not self.release:
            return None
        if self.release < _FIRST_WITH_NAMES:
            return False
        is_set = self.config.get("enableCDI") if self.config else None
        return is_set if isinstance(is_set, bool) else None

    def hands_on(self, annotation: str) -> bool:
        """Whether a handler that calls our shim gets an annotation of a container."""
        return any(
            fnmatch.fnmatchcase(annotation, pattern)
            for handler in self._runtimes.values()
            if isinstance(handler, dict)
            and calls_our_shim(handler.get("runtimeType"), handler.get("runtimePath"))
            for pattern in handler.get("ContainerAnnotations") or ()
            if isinstance(pattern, str)
        )

    def handler(self, name: str) -> Mapping[str, Any]:
        """The settings of a handler, under the engine's own names; none if it does not tell."""
        return _table(self._runtimes.get(name))

    @property
    def _runtimes(self) -> Mapping[str, Any]:
        return _table(_table(self.config.get("containerd")).get("runtimes"))

    def lacks(self, wanted: Mapping[str, Any]) -> list[str] | None:
        """What is wanted of its configuration and not in force.

        Args:
            wanted: settings by their names in containerd's files: of the CRI plugin
                (``enable_cdi``), and in ``containerd`` of that (``runtimes``).

        Returns:
            The settings, for people; None if it cannot be known.
        """
        if self._runtimes:
            return list(_differences(wanted, self.config))
        names = wanted.get("containerd", {}).get("runtimes", {})
        if self.handlers:
            return [f"the handler {name}" for name in names if name not in self.handlers]
        return None


def engine_of(version: pb.VersionResponse, status: pb.StatusResponse) -> Engine:
    """An engine, by its answers.

    Args:
        version: to Version.
        status: to Status, asked for with ``verbose``.
    """
    try:
        told = parse_json(status.info.get("config", "null"))
    except ValueError:
        told = None
    config = {key: told[key] for key in _TOLD if key in told} if isinstance(told, dict) else {}
    handlers = tuple(handler.name for handler in status.runtime_handlers)
    return Engine(version.runtime_name, version.runtime_version, config, handlers)


def _differences(wanted: Mapping[str, Any], there: Any, *path: str) -> Iterator[str]:
    """The settings that are not as wanted; options of a handler are compared as a whole."""
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
    """A value without what is empty in it, which to containerd is the same."""
    if not isinstance(value, dict):
        return value or None
    items = ((_key(key), _plain(each)) for key, each in value.items())
    return {key: each for key, each in items if each is not None} or None
