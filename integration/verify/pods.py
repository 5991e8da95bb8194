"""Create pods through the engine's CRI as a kubelet does, and remove all of them.

    with Pods(cri, settings, interrupts) as pods:
        result = pods.attempt(lambda pod: pod.run("exit", "42"))

Rules
- Every pod has a label. Pods left by an earlier run that was killed are removed first.
- A pod uses an image that the node already has, but runs no program of the image.
- Pods use the host network, so no CNI plugin takes part.
- If a signal arrives during a call that creates or starts something, it takes effect after the
  call. If such a call is abandoned at certain moments, containerd does not clean up: the container
  then keeps its pod from being removed.
- Someone else may remove the pod in the meantime. A kubelet does so within seconds, because it does
  not know the pod: it kills the containers and then stops the pod. A failure therefore counts only
  if the pod still exists a while later. Otherwise the work is repeated with another pod, a few
  times.

Source: CRI v1; containerd internal/cri/server (getCgroupsPath); kubelet HandlePodCleanups.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

from api.proto import cri_pb2 as pb
from api.proto.deviceplugin_pb2 import ContainerAllocateResponse
from integration.containers import verify_pods
from integration.cri.client import Cri
from integration.cri.errors import CriError, CriRefused
from integration.timeouts import PATIENCE
from integration.tree import PROBE
from integration.verify.errors import ImageMissing, PodKept
from integration.verify.interrupts import Interrupts
from integration.verify.outcomes import CheckFailed, CheckSkipped
from integration.verify.probe import END

LABEL: Final = "containerd-shim-nvidia/verify"
"""The label of every pod, by which the next run finds pods that this one could not remove."""

R = TypeVar("R")

_OURS: Final = "true"
_ATTEMPTS: Final = 5
_CREATE_TIMEOUT: Final = 60.0 * PATIENCE
_EXIT_TIMEOUT: Final = 60.0 * PATIENCE
_LOG_TIMEOUT: Final = 5.0 * PATIENCE
_REMOVAL_GRACE: Final = 3.0 * PATIENCE
_REMOVE_TIMEOUT: Final = 20.0 * PATIENCE
_POLL: Final = 0.02
_INSIDE: Final = f"/{PROBE}"
# Cgroup parents that already exist; one that is created for a pod would outlive it.
_SLICE: Final = "/system.slice"
_TOP: Final = "/"
_PAUSE: Final = "/pause"


@dataclass(frozen=True, slots=True)
class PodSettings:
    """Settings that all pods share."""

    handler: str  # the engine's runtime handler
    namespace: str
    image: str  # the id of an image that the engine has
    program: str  # the probe's path on the node
    directory: str  # for logs; the caller creates and removes it
    systemd: bool = False  # whether the handler uses the systemd cgroup driver


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """The result of a container or an exec."""

    code: int  # the exit code
    lines: tuple[str, ...] = ()  # its output


class Container:
    """A container of a pod.

    Args:
        cri: the engine.
        id: the container's id.
        log: the file with its output.
    """

    def __init__(self, cri: Cri, id: str, log: str) -> None:  # noqa: A002 - the field's term
        self.id = id
        self._cri = cri
        self._log = log

    @property
    def status(self) -> pb.ContainerStatus:
        """The container's status from the engine."""
        return self._cri.container_status(pb.ContainerStatusRequest(container_id=self.id)).status

    @property
    def is_running(self) -> bool:
        """Whether the container is running."""
        return self.status.state == pb.CONTAINER_RUNNING

    def lines(self) -> tuple[str, ...]:
        """Return the complete lines written so far, without the CRI log's columns."""
        try:
            with open(self._log, encoding="utf-8", errors="replace") as file:
                whole = [line.rstrip("\n").split(" ", 3) for line in file if line.endswith("\n")]
        except FileNotFoundError:
            return ()
        return tuple(columns[3] for columns in whole if len(columns) > 3)  # noqa: PLR2004 - above

    def looks(self, count: int = 1) -> tuple[str, ...]:
        """Wait until the probe has written a whole report, and return its lines.

        Args:
            count: the number of the report, from 1.

        Raises:
            CheckFailed: the report does not appear in time.
        """
        deadline = time.monotonic() + _LOG_TIMEOUT
        while (lines := self.lines()).count(END) < count:
            if time.monotonic() > deadline:
                raise CheckFailed(
                    "the container's output appears in its log",
                    seen=f"{len(lines)} lines; the last line of report {count} is missing",
                    do="see the engine's log, because the engine copies the output",
                )
            time.sleep(_POLL)
        ends = [-1, *(number for number, line in enumerate(lines) if line == END)]
        return lines[ends[count - 1] + 1 : ends[count]]

    def exec(self, *words: str) -> ProcessResult:
        """Run the probe in the container with other arguments."""
        request = pb.ExecSyncRequest(
            container_id=self.id, cmd=[_INSIDE, *words], timeout=int(_CREATE_TIMEOUT)
        )
        done = self._cri.exec_sync(request, timeout=_CREATE_TIMEOUT)
        return ProcessResult(
            done.exit_code, tuple(done.stdout.decode(errors="replace").splitlines())
        )

    def stop(self, grace: int) -> None:
        """Stop the container with SIGTERM, and SIGKILL after ``grace`` seconds."""
        request = pb.StopContainerRequest(container_id=self.id, timeout=grace)
        self._cri.stop_container(request, timeout=grace + _CREATE_TIMEOUT)

    def exit_code(self) -> int:
        """Wait until the container has exited and return its exit code.

        Raises:
            CheckFailed: it does not exit in time.
        """
        deadline = time.monotonic() + _EXIT_TIMEOUT
        while (status := self.status).state != pb.CONTAINER_EXITED:
            if time.monotonic() > deadline:
                raise CheckFailed(
                    "the container exits",
                    seen=f"it is {pb.ContainerState.Name(status.state)} after {_EXIT_TIMEOUT:g} s",
                    do="see the engine's log, and `nvshim ps`",
                )
            time.sleep(_POLL)
        return status.exit_code


class Pod:
    """A running pod.

    Args:
        pods: the object that created it.
        id: the pod sandbox's id.
        config: the configuration that the engine got.
    """

    def __init__(self, pods: Pods, id: str, config: pb.PodSandboxConfig) -> None:  # noqa: A002
        self.id = id
        self._pods = pods
        self._config = config
        self._containers = 0

    def status(self) -> pb.PodSandboxStatusResponse:
        """Return the pod's verbose status from the engine."""
        request = pb.PodSandboxStatusRequest(pod_sandbox_id=self.id, verbose=True)
        return self._pods.cri.pod_sandbox_status(request)

    def stays(self) -> bool:
        """Wait a moment and return whether the pod still exists, in case a removal is under way."""
        deadline = time.monotonic() + _REMOVAL_GRACE
        while self.is_there:
            if time.monotonic() > deadline:
                return True
            time.sleep(_POLL)
        return False

    @property
    def is_there(self) -> bool:
        """Whether the pod is ready; False once someone has stopped or removed it."""
        try:
            return self.status().status.state == pb.SANDBOX_READY
        except CriRefused:
            return False

    def start(
        self,
        *words: str,
        env: Mapping[str, str] | None = None,
        answer: ContainerAllocateResponse | None = None,
        trusted: bool = False,
    ) -> Container:
        """Start the probe in a new container.

        Args:
            words: the probe's arguments.
            env: the environment.
            answer: a device plugin's answer to apply, as the kubelet does.
            trusted: add CAP_SYS_ADMIN, so that the shim trusts the request in ``env``.
        """
        settings, self._containers = self._pods.settings, self._containers + 1
        name = f"verify-{self._containers}"
        security = pb.LinuxContainerSecurityContext(
            namespace_options=self._config.linux.security_context.namespace_options,
            seccomp=pb.SecurityProfile(profile_type=pb.SecurityProfile.Unconfined),
            run_as_user=pb.Int64Value(value=0),  # the image may set another user
            run_as_group=pb.Int64Value(value=0),
        )
        if trusted:
            security.capabilities.add_capabilities.append("SYS_ADMIN")
        program = pb.Mount(host_path=settings.program, container_path=_INSIDE, readonly=True)
        config = pb.ContainerConfig(
            metadata=pb.ContainerMetadata(name=name),
            image=pb.ImageSpec(image=settings.image),
            command=[_INSIDE, *words],
            working_dir="/",
            mounts=[program],
            log_path=f"{name}.log",
            linux=pb.LinuxContainerConfig(security_context=security),
        )
        _add_devices(config, env or {}, answer)
        request = pb.CreateContainerRequest(
            pod_sandbox_id=self.id, config=config, sandbox_config=self._config
        )
        with self._pods.interrupts.postponed():
            made = self._pods.cri.create_container(request, timeout=_CREATE_TIMEOUT).container_id
            self._pods.cri.start_container(
                pb.StartContainerRequest(container_id=made), timeout=_CREATE_TIMEOUT
            )
        return Container(
            self._pods.cri, made, os.path.join(self._config.log_directory, config.log_path)
        )

    def run(self, *words: str, **asked: Any) -> ProcessResult:
        """Start the probe in a new container, as :meth:`start` does, and wait until it exits."""
        container = self.start(*words, **asked)
        code = container.exit_code()
        return ProcessResult(code, container.looks() if words[0] == "look" else ())


class Pods:
    """Create a pod for each piece of work; the context removes all pods at the end.

    Args:
        cri: the engine.
        settings: the settings that all pods share.
        interrupts: the handler of terminating signals.
    """

    def __init__(self, cri: Cri, settings: PodSettings, interrupts: Interrupts) -> None:
        self.cri = cri
        self.settings = settings
        self.interrupts = interrupts

    def __enter__(self) -> Self:
        self.remove_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.interrupts.ignore()
        self.remove_all()

    def attempt(self, work: Callable[[Pod], R]) -> R:
        """Run ``work`` with a new pod, and remove the pod afterwards.

        Args:
            work: called with the pod; repeated if someone has removed the pod.

        Raises:
            CheckSkipped: the pod was removed on every attempt.
            CheckFailed: raised by ``work``.
            CriError: the engine refused a call.
        """
        for _ in range(_ATTEMPTS):
            pod = self._run()
            try:
                return work(pod)
            except (CriRefused, CheckFailed):
                if pod.stays():
                    raise
            finally:
                with contextlib.suppress(CriError):
                    self._remove(pod.id)
        raise CheckSkipped(
            f"the pod was removed {_ATTEMPTS} times during the check, as a kubelet does with pods "
            "that it does not know; try again when the node is less busy"
        )

    def remove_all(self) -> None:
        """Remove every pod with the label, also those of earlier runs.

        Raises:
            PodKept: the engine refuses to remove some; the others are removed.
            CriError: the engine does not answer.
        """
        deadline = time.monotonic() + _REMOVE_TIMEOUT
        refusals: dict[str, CriError] = {}
        while ours := self._ours():
            # Until then someone else may be removing it, or the engine may still be creating a
            # container for a run that was killed.
            kept = [pod for pod in ours if pod in refusals]
            if kept and time.monotonic() > deadline:
                names = " and ".join(sorted(ours[pod] for pod in kept))
                error = refusals[kept[0]]
                raise PodKept(f"to remove {names} of a verification", found=error.found) from error
            for pod in ours:
                try:
                    self._remove(pod)
                except CriError as error:
                    refusals[pod] = error
            time.sleep(_POLL)

    def _ours(self) -> dict[str, str]:
        """Return the names of the pods with the label, by id."""
        known = pb.PodSandboxFilter(label_selector={LABEL: _OURS})
        items = self.cri.list_pod_sandbox(pb.ListPodSandboxRequest(filter=known)).items
        # Some engines ignore the filter.
        return {pod.id: pod.metadata.name for pod in items if pod.labels.get(LABEL) == _OURS}

    def _run(self) -> Pod:
        uid = str(uuid.uuid4())
        name = f"{verify_pods.NAME}{uid[:8]}"
        namespaces = pb.NamespaceOption(network=pb.NODE, pid=pb.CONTAINER, ipc=pb.POD)
        config = pb.PodSandboxConfig(
            metadata=pb.PodSandboxMetadata(name=name, uid=uid, namespace=self.settings.namespace),
            log_directory=os.path.join(self.settings.directory, name),
            labels={LABEL: _OURS},
            linux=pb.LinuxPodSandboxConfig(
                cgroup_parent=_SLICE if self.settings.systemd else _TOP,
                security_context=pb.LinuxSandboxSecurityContext(
                    namespace_options=namespaces,
                    seccomp=pb.SecurityProfile(profile_type=pb.SecurityProfile.Unconfined),
                ),
            ),
        )
        os.makedirs(config.log_directory, mode=0o700)
        request = pb.RunPodSandboxRequest(config=config, runtime_handler=self.settings.handler)
        with self.interrupts.postponed():
            made = self.cri.run_pod_sandbox(request, timeout=_CREATE_TIMEOUT).pod_sandbox_id
        return Pod(self, made, config)

    def _remove(self, pod: str) -> None:
        self.cri.stop_pod_sandbox(
            pb.StopPodSandboxRequest(pod_sandbox_id=pod), timeout=_CREATE_TIMEOUT
        )
        self.cri.remove_pod_sandbox(
            pb.RemovePodSandboxRequest(pod_sandbox_id=pod), timeout=_CREATE_TIMEOUT
        )


def find_image(cri: Cri) -> str:
    """Return the id of the image for the pods: the pause image, or else the smallest image.

    Raises:
        ImageMissing: the engine has no image.
    """
    images: Sequence[pb.Image] = cri.list_images(pb.ListImagesRequest()).images
    if not images:
        raise ImageMissing("to find an image for the containers", found="the engine has none")

    def order(image: pb.Image) -> tuple[bool, bool, int]:
        names = [tag.rpartition(":")[0] for tag in image.repo_tags]
        return (not any(name.endswith(_PAUSE) for name in names), not image.pinned, image.size)

    return min(images, key=order).id


def _add_devices(
    config: pb.ContainerConfig, env: Mapping[str, str], answer: ContainerAllocateResponse | None
) -> None:
    """Add the environment and a plugin's answer to a container's configuration."""
    variables = dict(env)
    if answer is not None:
        variables = {**answer.envs, **variables}
        config.annotations.update(answer.annotations)
        for mount in answer.mounts:
            config.mounts.add(
                host_path=mount.host_path,
                container_path=mount.container_path,
                readonly=mount.read_only,
            )
        for device in answer.devices:
            config.devices.add(
                host_path=device.host_path,
                container_path=device.container_path,
                permissions=device.permissions,
            )
        for name in answer.cdi_devices:
            config.CDI_devices.add(name=name.name)
    for key, value in variables.items():
        config.envs.add(key=key, value=value.encode())
