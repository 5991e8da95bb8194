"""The CRI plugin of a private containerd: its configuration, and a separate pod network.

Rules
- Runtime handlers have the form of a node's config.toml: a table for each, by its name.
- Pods get an address on a bridge without other members. The host has no address there, and no
  route, packet filter or forwarding changes, so the network does not collide with others.
- The network's state (allocated addresses) and the files that hold pods' network namespaces are
  below containerd's own directory.

Source: containerd docs/cri/config.md; CNI spec 1.0, the plugins' own documentation.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tools.containerd import DISABLED_PLUGINS, PrivateContainerd
from tools.errors import CniNotInstalled

# The namespace of the CRI's containers and images, in every containerd.
NAMESPACE: Final = "k8s.io"

# The directories of CNI plugins, in Debian and as the projects install them.
_CNI_DIRECTORIES: Final = ("/usr/lib/cni", "/opt/cni/bin")
_CNI_PLUGINS: Final = ("bridge", "host-local", "loopback")
_SUBNET: Final = "10.213.0.0/16"

_NRI: Final = "io.containerd.nri.v1.nri"
_POD_ID: Final = re.compile(rb"\b[0-9a-f]{64}\b")

_STREAMING: Final = {
    "disable_tcp_service": False,
    "stream_server_address": "127.0.0.1",
    "stream_server_port": "0",
}
# Settings for a small machine, next to other containerds.
_MODEST: Final = {
    "disable_apparmor": True,
    "restrict_oom_score_adj": True,
    "netns_mounts_under_state_dir": True,
}


@dataclass(frozen=True, slots=True)
class CriPlugin:
    """The plugin's configuration."""

    # the tables below ``containerd.runtimes``, by the handler's name
    handlers: Mapping[str, Mapping[str, Any]]
    sandbox_image: str  # the image of a pod's first container
    default_handler: str = "runc"  # the handler of pods that name none
    cdi_directories: tuple[str, ...] = ()  # directories of CDI specs; empty for the default
    nri: bool = False  # whether it serves NRI, at :func:`nri_socket`

    def tables(self, version: int, directory: str) -> dict[str, Any]:
        """Return the plugin's tables in containerd's configuration.

        Args:
            version: of the configuration's format: 2, or 3 for containerd 2.x.
            directory: containerd's own, the same as for :meth:`write_network`.

        Returns:
            The tables by the plugin's name.

        Raises:
            CniNotInstalled: a plugin for the network is missing.
        """
        cdi = {"enable_cdi": True, "cdi_spec_dirs": list(self.cdi_directories)}
        runtime = {
            **_MODEST,
            **(cdi if self.cdi_directories else {}),
            "cni": {"conf_dir": _conf_directory(directory), **self._cni_binaries(version)},
            "containerd": {
                "default_runtime_name": self.default_handler,
                "runtimes": {name: dict(table) for name, table in self.handlers.items()},
            },
        }
        if version == 2:
            merged = {**_STREAMING, **runtime, "sandbox_image": self.sandbox_image}
            return {"io.containerd.grpc.v1.cri": merged, **self._nri(directory)}
        return {
            **self._nri(directory),
            "io.containerd.grpc.v1.cri": dict(_STREAMING),
            "io.containerd.cri.v1.runtime": runtime,
            "io.containerd.cri.v1.images": {"pinned_images": {"sandbox": self.sandbox_image}},
        }

    def _nri(self, directory: str) -> dict[str, Any]:
        if not self.nri:
            return {}
        places = {
            name: os.path.join(directory, name) for name in ("plugin_path", "plugin_config_path")
        }
        table = {"disable": False, "socket_path": nri_socket(directory), **places}
        return {_NRI: table}

    def write_network(self, directory: str, bridge: str) -> None:
        """Write the network's configuration; the network is created with the first pod.

        Args:
            bridge: name of the network, and of the interface that its pods share.
        """
        network = {
            "cniVersion": "0.4.0",
            "name": bridge,
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": bridge,
                    "isGateway": False,
                    "ipMasq": False,
                    "ipam": {
                        "type": "host-local",
                        "dataDir": addresses_directory(directory),
                        "ranges": [[{"subnet": _SUBNET}]],
                    },
                }
            ],
        }
        os.makedirs(_conf_directory(directory), exist_ok=True)
        path = os.path.join(_conf_directory(directory), "10-pods.conflist")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(network, file)

    @staticmethod
    def _cni_binaries(version: int) -> dict[str, Any]:
        for directory in _CNI_DIRECTORIES:
            if all(os.path.exists(os.path.join(directory, name)) for name in _CNI_PLUGINS):
                return {"bin_dir": directory} if version == 2 else {"bin_dirs": [directory]}
        raise CniNotInstalled(
            f"the plugins {', '.join(_CNI_PLUGINS)} for the pods' network",
            found=f"not all in {' or '.join(_CNI_DIRECTORIES)}",
            do="install the package containernetworking-plugins",
        )


class CriContainerd(PrivateContainerd):
    """A private containerd that serves the CRI."""

    disabled_plugins: tuple[str, ...] = DISABLED_PLUGINS  # type: ignore[misc] # see __init__

    def __init__(self, directory: str | None = None, *, cri: CriPlugin, **options: Any) -> None:
        super().__init__(directory, **options)
        self.shim_config: str = options.get("shim_config") or ""
        self._cri = cri
        if cri.nri:
            self.disabled_plugins = tuple(each for each in DISABLED_PLUGINS if each != _NRI)
        # The name of an interface has at most 15 bytes.
        self._bridge = self.namespace.replace("nvshim-", "nv")
        self._pods: set[str] = set()
        self._log_read = 0

    def configure_plugins(self, version: int) -> str:
        """Return the plugin's tables; also write the network's configuration."""
        self._cri.write_network(self.directory, self._bridge)
        tables = self._cri.tables(version, self.directory)
        return "".join(
            f"\n{to_toml(table, 'plugins', plugin)}\n" for plugin, table in tables.items()
        )

    def pod_ids(self) -> Iterable[str]:
        """Return the ids of the CRI so far, also of pods that it could not create.

        Only the log has all of them. Digests look the same, and do no harm.
        """
        with contextlib.suppress(FileNotFoundError), open(self.log_path, "rb") as file:
            file.seek(self._log_read)
            lines = file.read()
            lines = lines[: lines.rfind(b"\n") + 1]
            self._log_read += len(lines)
            self._pods.update(word.decode() for word in _POD_ID.findall(lines))
        return self._pods

    def remove(self) -> None:
        """Stop it and remove everything, also the pods' network."""
        super().remove()
        remove_bridge(self._bridge)


def nri_socket(directory: str) -> str:
    """Return the path of the NRI socket."""
    return os.path.join(directory, "nri.sock")


def addresses_directory(directory: str) -> str:
    """Return the directory where allocated addresses are recorded."""
    return os.path.join(directory, "cni", "addresses")


def remove_bridge(bridge: str) -> None:
    """Remove the interface that a network's pods share, if it exists."""
    if os.path.exists(f"/sys/class/net/{bridge}"):
        subprocess.run(
            ["ip", "link", "delete", bridge],
            check=False,
            capture_output=True,
        )


def to_toml(table: Mapping[str, Any], *path: str) -> str:
    """Return a table as TOML, including nested tables.

    Args:
        table: strings, booleans, integers, lists of these, and tables.
        path: the names of the parent tables.
    """
    lines = [f"[{'.'.join(map(json.dumps, path))}]"] if path else []
    below = []
    for key, value in table.items():
        if isinstance(value, dict):
            below.append(to_toml(value, *path, key))
        else:
            # TOML writes these values like JSON.
            lines.append(f"{json.dumps(key)} = {json.dumps(value)}")
    return "\n".join([*lines, *below])


def _conf_directory(directory: str) -> str:
    return os.path.join(directory, "cni", "conf")
