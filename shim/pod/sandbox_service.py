"""The Sandbox service, which containerd 2.x calls for ``sandboxer = "shim"``.

Handlers decode, call and encode; :mod:`shim.sandbox.sandbox` does the work.

Rules
- A shim has one sandbox, and serves the tasks of that pod.
- Stop ends the pod, including containers that still run or are being created, as StopPodSandbox
  promises. After that, no container can be created. Shutdown stops the pod, deletes the rest of its
  containers, and ends the shim.
- containerd needs the answer to Shutdown. A Go client that gets an answer and the end of the
  connection together may act on the latter. So the shim exits only when its clients have hung up,
  which containerd does after the answer.
- Stop and Shutdown may be repeated. Shutdown of a sandbox that was never created, or is gone,
  succeeds: containerd sends it after a failed Create, and the shim must then exit.
- containerd, not this shim, publishes the events ``/sandboxes/…``.

Source: containerd api/runtime/sandbox/v1/sandbox.proto, plugins/sandbox/controller.go,
plugins/services/sandbox/controller_service.go, internal/cri/server/sandbox_status.go.
"""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Final

from api import typeurl
from api.proto import sandbox_pb2, task_pb2
from api.ttrpc import Context, Service, ShuttingDown
from hooks.config import Namespaces, load_config
from hooks.errors import ConfigError
from shim import loop
from shim.cgroup import cgroup, stats
from shim.context import ShimContext
from shim.errors import NvshimError, TaskNotFound
from shim.files import check_id
from shim.pod.container import Container
from shim.pod.process import State as ProcessState
from shim.pod.service import TaskService, refused_by_system
from shim.sandbox.errors import (
    SandboxExists,
    SandboxNotFound,
    SandboxRootfsUnsupported,
    WrongSandboxState,
)
from shim.sandbox.pod import cgroup_path, read_pod
from shim.sandbox.sandbox import Sandbox, State

_STATES: Final = {
    State.CREATED: "SANDBOX_NOTREADY",
    State.READY: "SANDBOX_READY",
    State.ENDED: "SANDBOX_NOTREADY",
}

# containerd's names of the architectures.
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}

_IN_NETWORK: Final = frozenset({ProcessState.RUNNING, ProcessState.PAUSED})

# Seconds for a killed container to end.
_DYING: Final = 10.0


class SandboxService:
    """The sandbox of this shim.

    Args:
        shim: keeps the sandbox for the tasks.
        tasks: the tasks of the pod's containers.
    """

    def __init__(self, shim: ShimContext, tasks: TaskService) -> None:
        self._shim = shim
        self._tasks = tasks
        self._held: Sandbox | None = None

    def service(self) -> Service:
        """Return the service, for the server."""
        return _SERVICE.bind(self)

    def create(
        self, _: Context, request: sandbox_pb2.CreateSandboxRequest
    ) -> sandbox_pb2.CreateSandboxResponse:
        """Accept a sandbox; Start creates it."""
        check_id(request.sandbox_id, "sandbox id")
        asked = f"sandbox {request.sandbox_id}"
        if self._tasks.lifetime.ending:
            raise ShuttingDown(asked, found="a shim that is ending", do="create it once more")
        if self._held is not None:
            raise SandboxExists(
                asked,
                found=f"this shim has sandbox {self._held.id}",
                do="shut that down first",
            )
        if request.rootfs:
            raise SandboxRootfsUnsupported(
                f"{asked} with a root file system",
                found="a sandbox that is namespaces, and no container",
                do="create it without one",
            )
        pod = read_pod(request.options if request.HasField("options") else None, request.netns_path)
        bundle = request.bundle_path or os.getcwd()
        self._held = Sandbox(
            self._shim, request.sandbox_id, bundle, pod, by_paths=self._has_paths()
        )
        self._shim.sandbox = self._held
        self._tasks.lifetime.forget(request.sandbox_id)
        self._tasks.lifetime.changed()
        return sandbox_pb2.CreateSandboxResponse()

    def _has_paths(self) -> bool:
        """Whether the configuration makes containers find the pod's namespaces by paths."""
        try:
            return load_config().sandbox_namespaces == Namespaces.PATHS
        except ConfigError as error:  # pods must still start; a container with GPUs reports it
            self._shim.log.warning("the configuration is not read", why=str(error))
            return False

    async def start(
        self, _: Context, request: sandbox_pb2.StartSandboxRequest
    ) -> sandbox_pb2.StartSandboxResponse:
        """Create the pod's namespaces."""
        if self._held is None:
            raise WrongSandboxState(
                f"to start sandbox {request.sandbox_id}",
                found="it was not created",
                do="create it first",
            )
        sandbox = self._sandbox(request.sandbox_id)
        await sandbox.start()
        response = sandbox_pb2.StartSandboxResponse(
            pid=sandbox.pid, spec=typeurl.pack_json(sandbox.as_spec(), typeurl.SPEC)
        )
        response.created_at.FromNanoseconds(sandbox.created_at)
        return response

    def platform(
        self, _: Context, request: sandbox_pb2.PlatformRequest
    ) -> sandbox_pb2.PlatformResponse:
        """Return the platform of the pod's containers: this machine's."""
        self._sandbox(request.sandbox_id)
        response = sandbox_pb2.PlatformResponse()
        machine = os.uname().machine
        response.platform.os = "linux"
        response.platform.architecture = _ARCHITECTURES.get(machine, machine)
        return response

    async def stop(
        self, _: Context, request: sandbox_pb2.StopSandboxRequest
    ) -> sandbox_pb2.StopSandboxResponse:
        """End the pod's containers and its namespaces."""
        await self._stop(self._sandbox(request.sandbox_id), request.timeout_secs)
        return sandbox_pb2.StopSandboxResponse()

    async def wait(
        self, _: Context, request: sandbox_pb2.WaitSandboxRequest
    ) -> sandbox_pb2.WaitSandboxResponse:
        """Answer when the sandbox has ended."""
        exit_ = await self._sandbox(request.sandbox_id).wait()
        response = sandbox_pb2.WaitSandboxResponse()
        response.exited_at.FromNanoseconds(exit_.at if exit_ else time.time_ns())
        if exit_ is not None:
            response.exit_status = exit_.status
        return response

    def status(
        self, _: Context, request: sandbox_pb2.SandboxStatusRequest
    ) -> sandbox_pb2.SandboxStatusResponse:
        """Return the sandbox's status."""
        sandbox = self._sandbox(request.sandbox_id)
        response = sandbox_pb2.SandboxStatusResponse(
            sandbox_id=sandbox.id, pid=sandbox.live_pid, state=_STATES[sandbox.state]
        )
        response.created_at.FromNanoseconds(sandbox.created_at)
        if sandbox.exit is not None:
            response.exited_at.FromNanoseconds(sandbox.exit.at)
        response.info["pid"] = str(sandbox.live_pid)
        response.info["state"] = response.state
        if request.verbose:
            # CRI shows the first to users, and reads it as its own type.
            running = sandbox.state is State.READY
            info = {"pid": sandbox.live_pid, "processStatus": "running" if running else "stopped"}
            response.info["info"] = json.dumps(info)
            response.info["spec"] = json.dumps(sandbox.as_spec())
        return response

    def ping(self, _: Context, request: sandbox_pb2.PingRequest) -> sandbox_pb2.PingResponse:
        """Answer, to show that the sandbox is alive."""
        self._sandbox(request.sandbox_id)
        return sandbox_pb2.PingResponse()

    async def shutdown(
        self, context: Context, request: sandbox_pb2.ShutdownSandboxRequest
    ) -> sandbox_pb2.ShutdownSandboxResponse:
        """End the sandbox, the rest of the pod, and this process."""
        if self._held is not None:
            sandbox = self._sandbox(request.sandbox_id)
            await self._stop(sandbox, 0)
            for container in self._tasks.containers:
                try:
                    await self._tasks.delete(context, task_pb2.DeleteRequest(id=container.id))
                except TaskNotFound:
                    continue  # another client has deleted it
            if self._held is sandbox:
                self._held = self._shim.sandbox = None
        self._tasks.lifetime.end_when_empty(request.sandbox_id, after_hangup=True)
        return sandbox_pb2.ShutdownSandboxResponse()

    def metrics(
        self, _: Context, request: sandbox_pb2.SandboxMetricsRequest
    ) -> sandbox_pb2.SandboxMetricsResponse:
        """Return the usage of the whole pod, from its containers' common cgroup."""
        sandbox = self._sandbox(request.sandbox_id)
        parent = sandbox.pod.cgroup_parent
        read = stats.read(
            cgroup.at(cgroup_path(parent)) if parent else None,
            container_id=f"sandbox {sandbox.id}",
            pid=self._somebody_in(sandbox),
        )
        response = sandbox_pb2.SandboxMetricsResponse()
        response.metrics.id = sandbox.id
        response.metrics.timestamp.FromNanoseconds(time.time_ns())
        response.metrics.data.CopyFrom(typeurl.pack(read))
        return response

    def _somebody_in(self, sandbox: Sandbox) -> int:
        """Return a process in the pod's network namespace; 0 if there is none."""
        if sandbox.state is not State.READY:
            return 0
        running = (c.init.pid for c in self._tasks.containers if c.init.state in _IN_NETWORK)
        return sandbox.pid or next(running, 0)

    async def _stop(self, sandbox: Sandbox, grace: float) -> None:
        sandbox.close()
        async with loop.create_task_group() as ends:
            for container in self._tasks.containers:
                ends.start_soon(self._end, container, grace)
        await sandbox.stop()

    async def _end(self, container: Container, grace: float) -> None:
        """End one container of a stopping pod; its exit is published like any other."""
        init = container.init
        try:
            if not container.created:
                await container.cancel_create()
                if not container.created:  # it may have just succeeded
                    return
            if init.state is ProcessState.PAUSED:
                await self._thaw(container)
            if grace and init.state is ProcessState.RUNNING:
                await container.kill("", signal.SIGTERM, everyone=False)
                with loop.move_on_after(grace):
                    await init.wait()
            if init.exit is None:
                await container.kill("", signal.SIGKILL, everyone=False)
                with loop.move_on_after(_DYING):
                    await init.wait()
        except (NvshimError, OSError) as error:
            # It has ended meanwhile, or its Delete will report why not.
            self._shim.log.debug("ending a container", id=container.id, why=str(error))

    async def _thaw(self, container: Container) -> None:
        """Resume a container, so that it can end; failures are ignored."""
        try:
            await container.resume()
        except (NvshimError, OSError) as error:
            self._shim.log.debug("resuming a container", id=container.id, why=str(error))

    def _sandbox(self, sandbox_id: str) -> Sandbox:
        sandbox = self._held
        if sandbox is None or sandbox.id != sandbox_id:
            raise SandboxNotFound(
                f"sandbox {sandbox_id}",
                found=f"sandbox {sandbox.id}" if sandbox else "no sandbox in this shim",
                do="list the sandboxes",
            )
        return sandbox


# Created once, before a shim is forked.
_SERVICE: Final = Service(
    sandbox_pb2.DESCRIPTOR.services_by_name["Sandbox"],
    {
        "StartSandbox": SandboxService.start,
        "StopSandbox": SandboxService.stop,
        "WaitSandbox": SandboxService.wait,
        "ShutdownSandbox": SandboxService.shutdown,
    },
    immediate={
        "CreateSandbox": SandboxService.create,
        "Platform": SandboxService.platform,
        "SandboxStatus": SandboxService.status,
        "PingSandbox": SandboxService.ping,
        "SandboxMetrics": SandboxService.metrics,
    },
    shared=("WaitSandbox",),
    vital=("StopSandbox", "ShutdownSandbox"),
    shielded=("StartSandbox", "StopSandbox", "ShutdownSandbox"),
    translate=refused_by_system,
)
