"""Pods by CRI calls, as a kubelet makes them, for tests.

Each pod gets its own cgroup, log directory and metadata, as from a kubelet. They are removed at the
end of the test, in any state.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from api.proto import cri_pb2 as pb
from api.proto import deviceplugin_pb2
from integration.containers import traces
from integration.cri.client import Cri
from integration.cri.errors import CriError
from tests.harness.containerds import ENVIRONMENT, nothing_left
from tests.harness.kubelet_plugins import container_fields
from tests.harness.kubelet_root import KubeletRoot
from tests.harness.runtime import new_name
from tests.harness.waiting import eventually
from tools.cri.plugin import CriContainerd, CriPlugin
from tools.images import BUSYBOX, Image, write_archive
from tools.parts import Parts

IDLE: Final = ("sleep", "1000")

_STATES: Final = {
    pb.CONTAINER_CREATED: "CREATED",
    pb.CONTAINER_RUNNING: "RUNNING",
    pb.CONTAINER_EXITED: "EXITED",
    pb.CONTAINER_UNKNOWN: "UNKNOWN",
}


class LogLine(NamedTuple):
    """A line of a CRI container log: its time, stream, completeness and text."""

    time: str
    stream: str
    tag: str
    text: str


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of an exec."""

    code: int
    stdout: str
    stderr: str

    @property
    def lines(self) -> list[str]:
        return self.stdout.splitlines()


class PodContainer:
    """A container of a pod."""

    def __init__(self, pod: Pod, id: str, log_path: str) -> None:  # noqa: A002 - the field's term
        self.pod = pod
        self.id = id
        self.log_path = log_path
        self._cri = pod.pods.cri

    @property
    def status(self) -> pb.ContainerStatus:
        return self._cri.container_status(pb.ContainerStatusRequest(container_id=self.id)).status

    @property
    def state(self) -> str:
        return _STATES[self.status.state]

    @property
    def pid(self) -> int:
        """Return the host pid of its init process."""
        path = os.path.join(self.bundle, "init.pid")
        with open(path) as file:
            return int(file.read())

    @property
    def bundle(self) -> str:
        return self.pod.pods.containerd.bundle(self.id, namespace="k8s.io")

    def start(self) -> PodContainer:
        self._cri.start_container(pb.StartContainerRequest(container_id=self.id))
        return self

    def stop(self, *, grace: int = 0) -> None:
        self._cri.stop_container(pb.StopContainerRequest(container_id=self.id, timeout=grace))

    def remove(self) -> None:
        self._cri.remove_container(pb.RemoveContainerRequest(container_id=self.id))

    def exec(self, *command: str, timeout: int = 20) -> Ran:
        """Run a command in it; a non-zero exit code is not an error."""
        request = pb.ExecSyncRequest(container_id=self.id, cmd=command, timeout=timeout)
        done = self._cri.exec_sync(request)
        return Ran(done.exit_code, done.stdout.decode(), done.stderr.decode())

    def exec_url(self, *command: str, tty: bool = False, stdin: bool = True) -> str:
        """Return the streaming URL of a command in it."""
        return self._cri.exec(
            pb.ExecRequest(
                container_id=self.id, cmd=command, tty=tty, stdin=stdin, stdout=True, stderr=not tty
            )
        ).url

    def attach_url(self, *, tty: bool = False, stdin: bool = True) -> str:
        """Return the streaming URL of its own stdio."""
        return self._cri.attach(
            pb.AttachRequest(
                container_id=self.id, tty=tty, stdin=stdin, stdout=True, stderr=not tty
            )
        ).url

    def exit_code(self, *, timeout: float = 60) -> int:
        """Wait until it exits, and return its exit code."""
        eventually(lambda: self.state == "EXITED", f"{self.id} has exited", timeout=timeout)
        return self.status.exit_code

    def log_lines(self) -> list[LogLine]:
        """Return its log so far."""
        with open(self.log_path, encoding="utf-8") as file:
            return [LogLine(*line.rstrip("\n").split(" ", 3)) for line in file]

    def log_is_open(self) -> bool:
        """Return whether containerd still has its log open."""
        folder = f"/proc/{self.pod.pods.containerd.pid}/fd"
        for fd in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
                if os.readlink(f"{folder}/{fd}") == self.log_path:
                    return True
        return False

    def output(self, stream: str = "stdout") -> str:
        """Return its output on a stream so far."""
        return "".join(
            line.text + ("\n" if line.tag == "F" else "")
            for line in self.log_lines()
            if line.stream == stream
        )


class Pod:
    """A running pod."""

    def __init__(self, pods: Pods, config: pb.PodSandboxConfig, id: str) -> None:  # noqa: A002
        self.pods = pods
        self.config = config
        self.id = id

    @property
    def status(self) -> pb.PodSandboxStatus:
        request = pb.PodSandboxStatusRequest(pod_sandbox_id=self.id)
        return self.pods.cri.pod_sandbox_status(request).status

    @property
    def is_ready(self) -> bool:
        return self.status.state == pb.SANDBOX_READY

    @property
    def ip(self) -> str:
        return self.status.network.ip

    @property
    def shims(self) -> list[int]:
        """Return the pids of the shims that serve it."""
        marks = self.pods.containerd.marks
        path = traces.socket_path(marks, self.id, namespace="k8s.io")
        return self.pods.containerd.pids_listening_on(path)

    def create(
        self,
        *command: str,
        image: str = BUSYBOX,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        mounts: Iterable[pb.Mount] = (),
        security: pb.LinuxContainerSecurityContext | None = None,
        resources: pb.LinuxContainerResources | None = None,
        granted: deviceplugin_pb2.ContainerAllocateResponse | Mapping[str, str] | None = None,
        **fields: Any,
    ) -> PodContainer:
        """Create a container in it.

        Args:
            command: the command.
            mounts: directories of the host to mount.
            security: its security context; None for one with the pod's namespaces.
            granted: a device plugin's answer for it, or the variables of one. It is written to
                the kubelet's checkpoint, and the fields that the kubelet derives come first.
        """
        name = name or new_name()
        if granted is not None:
            answer = (
                granted
                if isinstance(granted, deviceplugin_pb2.ContainerAllocateResponse)
                else deviceplugin_pb2.ContainerAllocateResponse(envs=granted)
            )
            self.pods.kubelet.record(self.config.metadata.uid, name, answer)
            fields = container_fields(answer) | fields
            env = fields.pop("env") | dict(env or {})
            mounts = [*fields.pop("mounts"), *mounts]
        if security is None:
            security = pb.LinuxContainerSecurityContext(
                namespace_options=self.config.linux.security_context.namespace_options,
                seccomp=pb.SecurityProfile(profile_type=pb.SecurityProfile.Unconfined),
            )
        config = pb.ContainerConfig(
            metadata=pb.ContainerMetadata(name=name),
            image=pb.ImageSpec(image=image),
            command=command,
            envs=[pb.KeyValue(key=k, value=v.encode()) for k, v in (env or {}).items()],
            mounts=mounts,
            log_path=f"{name}.log",
            linux=pb.LinuxContainerConfig(security_context=security, resources=resources),
            **fields,
        )
        created = self.pods.cri.create_container(
            pb.CreateContainerRequest(
                pod_sandbox_id=self.id, config=config, sandbox_config=self.config
            )
        )
        log = os.path.join(self.config.log_directory, config.log_path)
        return PodContainer(self, created.container_id, log)

    def start(self, *command: str, **fields: Any) -> PodContainer:
        """Create and start a container in it."""
        return self.create(*command, **fields).start()

    def run(self, *command: str, **fields: Any) -> PodContainer:
        """Create and start a container in it, and wait until it exits."""
        container = self.start(*command, **fields)
        container.exit_code()
        # containerd may report the exit before it has logged the last output.
        eventually(lambda: not container.log_is_open(), "its log is whole")
        return container

    def stop(self, *, timeout: float = 40) -> None:
        request = pb.StopPodSandboxRequest(pod_sandbox_id=self.id)
        self.pods.cri.stop_pod_sandbox(request, timeout=timeout)

    def remove(self) -> None:
        """Stop and remove it, its containers and its cgroup, as a kubelet does."""
        cri = self.pods.cri
        cri.stop_pod_sandbox(pb.StopPodSandboxRequest(pod_sandbox_id=self.id))
        cri.remove_pod_sandbox(pb.RemovePodSandboxRequest(pod_sandbox_id=self.id))
        self.forget()

    def forget(self) -> None:
        """Remove the parts that a kubelet creates for it."""
        remove_cgroup(self.config.linux.cgroup_parent)
        shutil.rmtree(self.config.log_directory, ignore_errors=True)


class Pods:
    """The pods of a test.

    Args:
        containerd: serves the CRI; it runs during the test.
        handler: the pods' runtime handler.
    """

    def __init__(self, containerd: CriContainerd, handler: str) -> None:
        self.containerd = containerd
        self.handler = handler
        self.cri = Cri(containerd.address)
        self._configs: list[pb.PodSandboxConfig] = []
        self._kubelet = KubeletRoot(os.path.join(containerd.directory, "kubelet"))

    @property
    def kubelet(self) -> KubeletRoot:
        """The kubelet's records, which the shim is configured to read."""
        self._kubelet.set_in(self.containerd.shim_config)
        return self._kubelet

    @property
    def is_ours(self) -> bool:
        """Return whether pods use our shim, and not containerd's own for comparison."""
        return self.handler != "runc"

    def config(
        self,
        *,
        namespaces: pb.NamespaceOption | None = None,
        security: pb.LinuxSandboxSecurityContext | None = None,
        sysctls: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        hostname: str | None = None,
    ) -> pb.PodSandboxConfig:
        """Return a pod's configuration, as a kubelet makes it.

        Args:
            namespaces: the namespace modes; None for a pod's own network and IPC.
            sysctls: the sysctls of its namespaces.
            hostname: its host name; none with the host's network.
        """
        name = new_name("pod")
        if namespaces is None:
            namespaces = pb.NamespaceOption(pid=pb.CONTAINER)
        if security is None:
            security = pb.LinuxSandboxSecurityContext(
                namespace_options=namespaces,
                seccomp=pb.SecurityProfile(profile_type=pb.SecurityProfile.Unconfined),
            )
        if hostname is None:
            hostname = name if namespaces.network == pb.POD else ""
        config = pb.PodSandboxConfig(
            metadata=pb.PodSandboxMetadata(name=name, uid=name, namespace="tests"),
            hostname=hostname,
            log_directory=os.path.join(self.containerd.directory, "logs", name),
            annotations=annotations,
            linux=pb.LinuxPodSandboxConfig(
                cgroup_parent=f"/{self.containerd.namespace}/{name}",
                security_context=security,
                sysctls=sysctls,
            ),
        )
        self._configs.append(config)
        return config

    def run(self, *, handler: str | None = None, **fields: Any) -> Pod:
        """Run a pod with the configuration of :meth:`config`."""
        return self.run_config(self.config(**fields), handler=handler)

    def run_config(self, config: pb.PodSandboxConfig, *, handler: str | None = None) -> Pod:
        """Run a pod with this configuration."""
        os.makedirs(config.log_directory, exist_ok=True)
        request = pb.RunPodSandboxRequest(config=config, runtime_handler=handler or self.handler)
        return Pod(self, config, self.cri.run_pod_sandbox(request).pod_sandbox_id)

    def ids(self) -> list[str]:
        """Return the ids of all pods in the CRI."""
        return [pod.id for pod in self.cri.list_pod_sandbox(pb.ListPodSandboxRequest()).items]

    def close(self) -> None:
        """Remove every pod, and the parts that a kubelet creates for the requested ones."""
        with self.cri:
            for pod in self.ids():
                with contextlib.suppress(CriError):
                    self.cri.stop_pod_sandbox(pb.StopPodSandboxRequest(pod_sandbox_id=pod))
                    self.cri.remove_pod_sandbox(pb.RemovePodSandboxRequest(pod_sandbox_id=pod))
            for config in self._configs:
                Pod(self, config, "").forget()


def host_directory(host: str, container: str, *, readonly: bool = False) -> pb.Mount:
    """Return a mount of a host directory at a path in a container."""
    return pb.Mount(host_path=host, container_path=container, readonly=readonly)


@contextlib.contextmanager
def containerd_for_pods(*images: Image, **options: Any) -> Iterator[CriContainerd]:
    """Run a containerd that serves the CRI, with images in it, and remove it at the end.

    Args:
        options: those of :class:`CriContainerd`, such as ``cri``.
    """
    options = {"environment": ENVIRONMENT, **options}
    with CriContainerd(**options) as containerd, Cri(containerd.address) as cri:
        archive = write_archive(f"{containerd.directory}/pods.tar", images)
        import_image(cri, containerd, archive, *(image.name for image in images))
        os.unlink(archive)
        yield containerd


@contextlib.contextmanager
def pods_of(
    plugin: CriPlugin, *images: Image, shim_directory: str, shim_config: str, parts: Parts
) -> Iterator[Pods]:
    """Yield pods with the default handler on their own containerd; fail if anything is left."""
    with (
        containerd_for_pods(
            *images, shim_directory=shim_directory, shim_config=shim_config, parts=parts, cri=plugin
        ) as containerd,
        nothing_left(containerd),
    ):
        pods = Pods(containerd, plugin.default_handler)
        yield pods
        pods.close()


def import_image(cri: Cri, containerd: CriContainerd, archive: str, *names: str) -> None:
    """Import the images of an archive, and wait until the CRI has them."""
    containerd.ctr("images", "import", archive, namespace="k8s.io")
    for name in names:
        request = pb.ImageStatusRequest(image=pb.ImageSpec(image=name))
        eventually(partial(_is_known, cri, request), f"the CRI knows {name}")


def _is_known(cri: Cri, request: pb.ImageStatusRequest) -> bool:
    return cri.image_status(request).HasField("image")


def remove_cgroup(path: str) -> None:
    """Remove a pod's cgroup from every hierarchy once it is empty."""

    def remove() -> bool:
        left = [h + path for h in traces.cgroup_hierarchies() if os.path.exists(h + path)]
        for directory in left:
            with contextlib.suppress(OSError):
                os.rmdir(directory)
        return not left

    eventually(remove, f"the cgroup {path} is removed")
