"""A sandbox of a shim without containerd, and containers in its pod, as CRI makes them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import pytest

from api import typeurl
from api.proto import cgroups_v1_pb2, cgroups_v2_pb2, pod_pb2, sandbox_pb2
from api.ttrpc import RemoteError
from tests.harness.runtime import is_alive
from tests.harness.shim import ShimByHand

SERVICE: Final = "containerd.runtime.sandbox.v1.Sandbox"
NODE: Final = pod_pb2.NODE
NAMESPACES: Final = {"network": "net", "ipc": "ipc", "uts": "uts", "pid": "pid", "user": "user"}


class SandboxByHand:
    """One sandbox, and containerd's calls of it.

    Args:
        shim: its shim. The sandbox's bundle is that of the shim's first container.
        sandbox_id: its id.
    """

    def __init__(self, shim: ShimByHand, sandbox_id: str = "pod") -> None:
        self.shim = shim
        self.id = sandbox_id
        self.bundle = os.path.join(shim.directory, sandbox_id)
        self.pid = 0
        self.spec: dict[str, Any] = {}

    async def call(self, method: str, *, timeout: float = 60, **fields: Any) -> Any:
        """Call a method of the Sandbox service by its name and its request's fields."""
        service = sandbox_pb2.DESCRIPTOR.services_by_name["Sandbox"]
        described = service.methods_by_name[method]
        request = getattr(sandbox_pb2, described.input_type.name)(
            **{"sandbox_id": self.id, **fields}
        )
        response = getattr(sandbox_pb2, described.output_type.name)
        return await self.shim.client.call(SERVICE, method, request, response, timeout=timeout)

    async def create(self, *, netns_path: str = "", **config: Any) -> None:
        """Create it, from the fields of a PodSandboxConfig."""
        url = "runtime.v1.PodSandboxConfig"
        options = typeurl.pack(pod_pb2.PodSandboxConfig(**config), url=url)
        await self.call(
            "CreateSandbox", bundle_path=self.bundle, options=options, netns_path=netns_path
        )

    async def start(self, **config: Any) -> int:
        """Create and start it; return the pid of its holder, or 0."""
        await self.create(**config)
        started = await self.call("StartSandbox")
        self.pid, self.spec = started.pid, json.loads(started.spec.value)
        return self.pid

    @property
    def paths(self) -> dict[str, str]:
        """Return the paths of its namespaces by type, from the answer to Start."""
        return {each["type"]: each["path"] for each in self.spec["linux"]["namespaces"]}

    async def state(self) -> str:
        """Return the state that CRI would show."""
        return str((await self.call("SandboxStatus")).state)

    def namespace(self, name: str, pid: int | None = None) -> str:
        """Return a process's namespace of this type; the holder's by default."""
        return os.readlink(f"/proc/{self.pid if pid is None else pid}/ns/{name}")

    def member(self, container_id: str, *args: str, share: str = "network ipc uts") -> None:
        """Make the bundle of a container in the pod; ``share`` names the namespaces it joins."""
        self.shim.bundle(container_id, *args)
        spec = self.shim.spec(container_id)
        kept = [n for n in spec["linux"]["namespaces"] if n["type"] not in share.split()]
        paths = self.paths or {k: f"/proc/{self.pid}/ns/{n}" for k, n in NAMESPACES.items()}
        joined = [{"type": kind, "path": paths[kind]} for kind in share.split()]
        spec["linux"]["namespaces"] = kept + joined
        spec.pop("hostname", None)
        self.shim.write_spec(container_id, spec)

    async def run(
        self, container_id: str, *args: str, share: str = "network ipc uts", **fields: Any
    ) -> int:
        """Make, create and start a container in the pod; return its init's pid."""
        self.member(container_id, *args, share=share)
        return await self.shim.run(container_id, **fields)

    async def gone(self) -> None:
        """Shut it down, and check that the shim exits and nothing is left."""
        await self.call("ShutdownSandbox")
        self.shim.client.close()  # as containerd does after the answer
        await self.shim.until_gone()
        assert self.leftovers() == []

    def leftovers(self) -> list[str]:
        """Return what is left on the machine, and of the sandbox in its bundle."""
        left = self.shim.leftovers()
        if self.pid and is_alive(self.pid):
            left.append(f"holder {self.pid}")
        files = os.listdir(self.bundle) if os.path.isdir(self.bundle) else []
        own = [f for f in files if f in ("pod", "holder", "ns") or f.startswith("member.")]
        return left + [f"file {name}" for name in own]

    def kill_holder(self) -> None:
        """Kill the holder from outside."""
        os.kill(self.pid, signal.SIGKILL)


StartPod = Callable[..., AbstractAsyncContextManager[SandboxByHand]]
"""The type of the fixture of that name, which starts a shim and its sandbox."""


def linux_of(**namespaces: Any) -> dict[str, Any]:
    """Return the configuration of a pod's namespaces."""
    return {"security_context": {"namespace_options": namespaces}}


def users_of(mode: int) -> dict[str, Any]:
    """Return the configuration of a pod in a user namespace."""
    mapping = {"host_id": 200000, "container_id": 0, "length": 65536}
    users = {"mode": mode, "uids": [mapping], "gids": [mapping]}
    return {"linux": linux_of(userns_options=users)}


def enter(pid: int, *command: str) -> str:
    """Run a command of the node in the network, IPC and UTS namespaces of a process."""
    return nsenter("--target", str(pid), "--net", "--ipc", "--uts", *command)


def nsenter(*words: str) -> str:
    """Run a command of the node in some namespaces; return its output."""
    return subprocess.run(["nsenter", *words], capture_output=True, check=True, text=True).stdout


async def refusal_of(call: Any) -> RemoteError:
    """Return the one-line message with which a call is refused."""
    with pytest.raises(RemoteError) as refused:
        await call
    assert "\n" not in str(refused.value)
    return refused.value


async def metrics_of(pod: SandboxByHand) -> Any:
    """Return the answer of SandboxMetrics."""
    metric = (await pod.call("SandboxMetrics")).metrics
    assert metric.id == "pod"
    v2 = typeurl.full_name(metric.data).endswith("v2.Metrics")
    return typeurl.unpack(metric.data, cgroups_v2_pb2.Metrics if v2 else cgroups_v1_pb2.Metrics)
