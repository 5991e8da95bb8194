"""Run the pod of a DaemonSet by CRI calls, as a kubelet does, in a :mod:`.world`.

The manifest is the output of ``kubectl kustomize``. Everything that decides what the container may
do is passed on: its user, capabilities, seccomp profile, privileges, mounts with their propagation,
environment and limits. Its probes run as they are written. Two things differ from a kubelet: the
pod is in the node's network, since there is no other here, and no oom_score_adj is lowered, since
the machine may lack the capability for it.

Source: CRI v1; kubelet pkg/kubelet/kuberuntime (security_context.go, kuberuntime_container.go),
pkg/volume/util/atomic_writer.go.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Self

from api.proto import cri_pb2 as pb
from api.proto import deviceplugin_pb2
from integration.containers import traces
from integration.cri.client import Cri
from integration.cri.errors import CriError
from tests.harness.kubelet_root import KubeletRoot
from tests.harness.runtime import new_name
from tests.harness.waiting import eventually
from tests.harness.world import World

SOCKET: Final = "/run/containerd/containerd.sock"
LOGS: Final = "/var/lib/pods"

_PROPAGATION: Final = {
    None: pb.PROPAGATION_PRIVATE,
    "None": pb.PROPAGATION_PRIVATE,
    "HostToContainer": pb.PROPAGATION_HOST_TO_CONTAINER,
    "Bidirectional": pb.PROPAGATION_BIDIRECTIONAL,
}
_SECCOMP: Final = {
    None: pb.SecurityProfile.Unconfined,
    "RuntimeDefault": pb.SecurityProfile.RuntimeDefault,
}
# The paths that a kubelet masks in unprivileged containers.
_MASKED: Final = (
    "/proc/asound", "/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
    "/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/sys/firmware",
)  # fmt: skip
_READONLY: Final = (
    "/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger",
)  # fmt: skip
_UNITS: Final = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of a program in a container."""

    code: int
    output: str


class Container:
    """A container of a pod."""

    def __init__(self, kubelet: Kubelet, id: str, spec: dict[str, Any], log: str) -> None:  # noqa: A002
        self._kubelet = kubelet
        self.id = id
        self.spec = spec
        self._log = log

    @property
    def status(self) -> pb.ContainerStatus:
        request = pb.ContainerStatusRequest(container_id=self.id)
        return self._kubelet.cri.container_status(request).status

    def exit_code(self, *, timeout: float = 60) -> int:
        """Wait until it exits; return its exit code."""
        eventually(lambda: self.status.state == pb.CONTAINER_EXITED, "its end", timeout=timeout)
        return self.status.exit_code

    def probe(self, kind: str) -> Ran:
        """Run a probe as it is written: ``readiness``, ``liveness``, ``startup``."""
        probe = self.spec[f"{kind}Probe"]
        request = pb.ExecSyncRequest(
            container_id=self.id, cmd=probe["exec"]["command"], timeout=probe["timeoutSeconds"]
        )
        done = self._kubelet.cri.exec_sync(request)
        return Ran(done.exit_code, (done.stdout + done.stderr).decode())

    def stop(self, grace: int) -> None:
        request = pb.StopContainerRequest(container_id=self.id, timeout=grace)
        self._kubelet.cri.stop_container(request, timeout=grace + 10)

    def log(self) -> str:
        """Return its output, without the columns of the CRI log format."""
        text = self._kubelet.read(self._log)
        return "\n".join(line.split(" ", 3)[3] for line in text.splitlines())


class Kubelet:
    """A kubelet for one machine. Leaving the context removes all its pods.

    Args:
        world: the machine, with a running containerd.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.cri = Cri(world.path(SOCKET))
        self.cgroup = new_name("kubelet")
        self.config_maps: dict[str, dict[str, str]] = {}
        """The content of ConfigMaps, by name."""
        self._mounted: dict[str, list[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):
            for pod in self.cri.list_pod_sandbox(pb.ListPodSandboxRequest()).items:
                self.remove_pod(pod.id)
        self.cri.close()

    def read(self, path: str) -> str:
        """Read a file of the machine."""
        with open(self.world.path(path), encoding="utf-8") as file:
            return file.read()

    def reconnect(self) -> None:
        """Reconnect after a restart of the engine, which listens before it can answer."""
        self.cri.close()
        self.cri = Cri(self.world.path(SOCKET))
        eventually(self._answers, "the engine answers")

    def _answers(self) -> bool:
        try:
            self.cri.list_pod_sandbox(pb.ListPodSandboxRequest())
        except CriError:
            return False
        return True

    def remove_cgroups(self) -> None:
        """Remove the cgroups of the pods, once the machine is gone."""
        for hierarchy in traces.cgroup_hierarchies():
            for directory, _, _ in os.walk(os.path.join(hierarchy, self.cgroup), topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(directory)

    def run_pod(
        self, name: str, *, handler: str = "", host_pid: bool = False, privileged: bool = False
    ) -> tuple[str, pb.PodSandboxConfig]:
        """Run a pod sandbox; return its id and its configuration."""
        namespaces = _namespaces(host_pid=host_pid)
        uid = new_name(name)
        config = pb.PodSandboxConfig(
            metadata=pb.PodSandboxMetadata(name=name, uid=uid, namespace="containerd-shim-nvidia"),
            log_directory=os.path.join(LOGS, uid),
            linux=pb.LinuxPodSandboxConfig(
                cgroup_parent=f"/{self.cgroup}/{uid}",
                security_context=pb.LinuxSandboxSecurityContext(
                    namespace_options=namespaces, privileged=privileged
                ),
            ),
        )
        os.makedirs(self.world.path(config.log_directory))
        request = pb.RunPodSandboxRequest(config=config, runtime_handler=handler)
        return self.cri.run_pod_sandbox(request).pod_sandbox_id, config

    def remove_pod(self, pod: str) -> None:
        self.cri.stop_pod_sandbox(pb.StopPodSandboxRequest(pod_sandbox_id=pod))
        self.cri.remove_pod_sandbox(pb.RemovePodSandboxRequest(pod_sandbox_id=pod))

    def record(
        self,
        pod: tuple[str, pb.PodSandboxConfig],
        container: str,
        answer: deviceplugin_pb2.ContainerAllocateResponse,
    ) -> None:
        """Record a device plugin's answer for a container of a pod."""
        root = KubeletRoot(self.world.path("/var/lib/kubelet"))
        root.record(pod[1].metadata.uid, container, answer)

    def start(
        self, pod: tuple[str, pb.PodSandboxConfig], config: pb.ContainerConfig, spec: dict[str, Any]
    ) -> Container:
        """Create and start a container in a pod."""
        sandbox, pod_config = pod
        config.linux.security_context.namespace_options.CopyFrom(
            pod_config.linux.security_context.namespace_options
        )
        config.log_path = f"{config.metadata.name}.log"
        request = pb.CreateContainerRequest(
            pod_sandbox_id=sandbox, config=config, sandbox_config=pod_config
        )
        container = self.cri.create_container(request).container_id
        self.cri.start_container(pb.StartContainerRequest(container_id=container))
        log = os.path.join(pod_config.log_directory, config.log_path)
        return Container(self, container, spec, log)

    def run_daemon_set(
        self,
        daemon_set: dict[str, Any],
        *,
        image: str,
        answer: deviceplugin_pb2.ContainerAllocateResponse | None = None,
    ) -> tuple[str, Container]:
        """Run the pod of a DaemonSet or a Job on this node.

        Args:
            image: the engine's name of its image.
            answer: the device plugin's answer for its container.

        Returns:
            The pod's id, and its only container.
        """
        spec = daemon_set["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        host_pid = spec.get("hostPID", False)
        pod = self.run_pod(
            daemon_set["metadata"]["name"],
            handler=spec.get("runtimeClassName", ""),
            host_pid=host_pid,
            privileged=container["securityContext"].get("privileged", False),
        )
        volumes = {
            volume["name"]: self._volume(volume, pod[1].metadata.uid)
            for volume in spec.get("volumes", ())
        }
        config = pb.ContainerConfig(
            metadata=pb.ContainerMetadata(name=container["name"]),
            image=pb.ImageSpec(image=image),
            command=container.get("command", ()),
            args=container.get("args", ()),
            envs=[
                pb.KeyValue(key=each["name"], value=_value_of(each).encode())
                for each in container.get("env", ())
            ],
            mounts=list(_mounts(container.get("volumeMounts", ()), volumes)),
            linux=pb.LinuxContainerConfig(
                security_context=_security(container["securityContext"], host_pid=host_pid),
                resources=pb.LinuxContainerResources(
                    memory_limit_in_bytes=_bytes(container["resources"]["limits"]["memory"])
                ),
            ),
        )
        if answer is not None:
            self.record(pod, container["name"], answer)
            config.annotations.update(answer.annotations)
            for key, value in answer.envs.items():
                config.envs.add(key=key, value=value.encode())
        return pod[0], self.start(pod, config, container)

    def _volume(self, volume: dict[str, Any], uid: str) -> str:
        """Create a volume according to its kind; return its path on the machine."""
        if "emptyDir" in volume:
            path = os.path.join("/var/lib/kubelet-volumes", uid, volume["name"])
            os.makedirs(self.world.path(path))
            return path
        if "configMap" in volume:
            path = os.path.join("/var/lib/kubelet-volumes", uid, volume["name"])
            self._mounted.setdefault(volume["configMap"]["name"], []).append(path)
            self._write(volume["configMap"]["name"], path)
            return path
        if "projected" in volume:
            path = os.path.join("/var/lib/kubelet-volumes", uid, volume["name"])
            os.makedirs(self.world.path(path))
            for name in ("token", "ca.crt"):
                with open(self.world.path(f"{path}/{name}"), "w", encoding="ascii") as file:
                    file.write(f"{name} of {uid}")
            return path
        path = volume["hostPath"]["path"]
        if volume["hostPath"].get("type") == "DirectoryOrCreate":
            os.makedirs(self.world.path(path), exist_ok=True)
        return str(path)

    def change_config_map(self, name: str, data: dict[str, str]) -> None:
        """Change a ConfigMap, and update the volumes that mount it."""
        self.config_maps[name] = data
        for path in self._mounted.get(name, ()):
            self._write(name, path)

    def _write(self, name: str, path: str) -> None:
        """Write a ConfigMap as a kubelet does: replacing a link changes all files at once."""
        here = self.world.path(path)
        os.makedirs(here, exist_ok=True)
        link, new = os.path.join(here, "..data"), new_name("..")
        before = os.readlink(link) if os.path.islink(link) else ""
        os.mkdir(os.path.join(here, new))
        for key, text in self.config_maps[name].items():
            with open(os.path.join(here, new, key), "w", encoding="utf-8") as file:
                file.write(text)
            with contextlib.suppress(FileExistsError):
                os.symlink(f"..data/{key}", os.path.join(here, key))
        os.symlink(new, f"{link}_tmp")
        os.rename(f"{link}_tmp", link)
        if before:
            shutil.rmtree(os.path.join(here, before))


def _value_of(variable: dict[str, Any]) -> str:
    """Return the value of a variable, or of the pod field that it refers to."""
    if "value" in variable:
        return str(variable["value"])
    fields = {"spec.nodeName": os.uname().nodename}
    return fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]


def _mounts(asked: Iterable[dict[str, Any]], volumes: dict[str, str]) -> Iterable[pb.Mount]:
    for each in asked:
        yield pb.Mount(
            host_path=volumes[each["name"]],
            container_path=each["mountPath"],
            readonly=each.get("readOnly", False),
            propagation=_PROPAGATION[each.get("mountPropagation")],
        )


def _namespaces(*, host_pid: bool) -> pb.NamespaceOption:
    return pb.NamespaceOption(
        network=pb.NODE, pid=pb.NODE if host_pid else pb.CONTAINER, ipc=pb.POD
    )


def _security(asked: dict[str, Any], *, host_pid: bool) -> pb.LinuxContainerSecurityContext:
    privileged = asked.get("privileged", False)
    capabilities = asked.get("capabilities") or {}
    seccomp = (asked.get("seccompProfile") or {}).get("type")
    return pb.LinuxContainerSecurityContext(
        privileged=privileged,
        namespace_options=_namespaces(host_pid=host_pid),
        capabilities=pb.Capability(
            add_capabilities=capabilities.get("add", ()),
            drop_capabilities=capabilities.get("drop", ()),
        ),
        readonly_rootfs=asked.get("readOnlyRootFilesystem", False),
        no_new_privs=asked.get("allowPrivilegeEscalation") is False,
        run_as_user=pb.Int64Value(value=asked.get("runAsUser", 0)),
        run_as_group=pb.Int64Value(value=asked.get("runAsGroup", 0)),
        seccomp=pb.SecurityProfile(profile_type=_SECCOMP[seccomp]),
        selinux_options=pb.SELinuxOption(type=asked.get("seLinuxOptions", {}).get("type", "")),
        masked_paths=() if privileged else _MASKED,
        readonly_paths=() if privileged else _READONLY,
    )


def _bytes(quantity: str) -> int:
    found = re.fullmatch(r"(\d+)(\D*)", quantity)
    assert found is not None
    return int(found[1]) * _UNITS[found[2]]
