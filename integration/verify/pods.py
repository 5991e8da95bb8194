"""Pods by the engine's CRI, as a kubelet makes them, and nothing left of them.

    with Pods(cri, place, interrupts) as pods:
        ran = pods.attempt(lambda pod: pod.run("exit", "42"))

Rules
- Whatever is left of an earlier run that was killed is removed first: every pod has a label.
- A pod is made of an image that the node has; nothing of it is run.
- The network is the node's, so that no CNI plugin has a part in it.
- Somebody else may remove the pod meanwhile. A kubelet does within some seconds, since the pod is
  none of its own: it kills the containers, and then stops the pod. So what went wrong counts if the
  pod is there a while later; if not, the work is done again with another pod, some times.

Source: CRI v1; containerd internal/cri/server (getCgroupsPath); kubelet HandlePodCleanups.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from api.proto import cri_pb2 as pb
from api.proto.deviceplugin_pb2 import ContainerAllocateResponse
from integration.cri.errors import CriError, CriRefused
from integration.timeouts import PATIENCE
from integration.tree import PROBE
from integration.verify.errors import ImageMissing
from integration.verify.interrupts import Interrupts
from integration.verify.outcomes import NotAsExpected, NotMade
from integration.verify.program import END

if TYPE_CHECKING:
    from integration.cri.client import Cri

LABEL: Final = "containerd-shim-nvidia/verify"
"""Of every pod, so that the next run finds what this one could not remove."""

R = TypeVar("R")

_OURS: Final = "true"
_ATTEMPTS: Final = 5
_TO_MAKE: Final = 60.0 * PATIENCE
_TO_END: Final = 60.0 * PATIENCE
_TO_WRITE: Final = 5.0 * PATIENCE
_TO_GO: Final = 3.0 * PATIENCE
_TO_REMOVE: Final = 20.0 * PATIENCE
_POLL: Final = 0.02
_INSIDE: Final = f"/{PROBE}"
# What is there already: a parent that is made for a pod outlives it.
_SLICE: Final = "/system.slice"
_TOP: Final = "/"
_PAUSE: Final = "/pause"


@dataclass(frozen=True, slots=True)
class Place:
    """What pods are made with."""

    handler: str  # the engine's
    namespace: str  # the pods'
    image: str  # the id of one that the engine has
    program: str  # on the node
    directory: str  # for logs; it is there, and removed by who made it
    systemd: bool = False  # whether the handler's cgroups are systemd's


@dataclass(frozen=True, slots=True)
class Ran:
    """How a container or an exec ended."""

    code: int  # its exit code
    lines: tuple[str, ...] = ()  # what it wrote


class Container:
    """A container of a pod.

    Args:
        cri: the engine.
        id: what the CRI calls it.
        log: where its output is.
    """

    def __init__(self, cri: Cri, id: str, log: str) -> None:  # noqa: A002 - the field's term
        self.id = id
        self._cri = cri
        self._log = log

    @property
    def status(self) -> pb.ContainerStatus:
        """What the engine says of it."""
        return self._cri.container_status(pb.ContainerStatusRequest(container_id=self.id)).status

    @property
    def is_running(self) -> bool:
        """Whether it runs."""
        return self.status.state == pb.CONTAINER_RUNNING

    def lines(self) -> tuple[str, ...]:
        """What it has written so far, without the CRI's own columns."""
        try:
            with open(self._log, encoding="utf-8", errors="replace") as file:
                whole = [line.rstrip("\n").split(" ", 3) for line in file if line.endswith("\n")]
        except FileNotFoundError:
            return ()
        return tuple(columns[3] for columns in whole if len(columns) > 3)  # noqa: PLR2004 - above

    def looks(self, count: int = 1) -> tuple[str, ...]:
        """Wait for a look of the program to be written whole, and return its lines.

        Args:
            count: which look, from 1.

        Raises:
            NotAsExpected: it does not come.
        """
        deadline = time.monotonic() + _TO_WRITE
        while (lines := self.lines()).count(END) < count:
            if time.monotonic() > deadline:
                raise NotAsExpected(
                    "the container's output in its log",
                    seen=f"{len(lines)} lines, and not the last of look {count}",
                    do="see the engine's log: it copies the output",
                )
            time.sleep(_POLL)
        ends = [-1, *(number for number, line in enumerate(lines) if line == END)]
        return lines[ends[count - 1] + 1 : ends[count]]

    def exec(self, *words: str) -> Ran:
        """Run the program in it, with other words."""
        request = pb.ExecSyncRequest(
            container_id=self.id, cmd=[_INSIDE, *words], timeout=int(_TO_MAKE)
        )
        done = self._cri.exec_sync(request, timeout=_TO_MAKE)
        return Ran(done.exit_code, tuple(done.stdout.decode(errors="replace").splitlines()))

    def stop(self, grace: int) -> None:
        """Send it SIGTERM, and SIGKILL some seconds later."""
        request = pb.StopContainerRequest(container_id=self.id, timeout=grace)
        self._cri.stop_container(request, timeout=grace + _TO_MAKE)

    def exit_code(self) -> int:
        """Wait for its end.

        Raises:
            NotAsExpected: it does not come.
        """
        deadline = time.monotonic() + _TO_END
        while (status := self.status).state != pb.CONTAINER_EXITED:
            if time.monotonic() > deadline:
                raise NotAsExpected(
                    "the end of the container",
                    seen=f"it is {pb.ContainerState.Name(status.state)} after {_TO_END:g} s",
                    do="see the engine's log, and `nvshim ps`",
                )
            time.sleep(_POLL)
        return status.exit_code


class Pod:
    """A pod that runs.

    Args:
        pods: whose it is.
        id: what the CRI calls it.
        config: as it was asked for.
    """

    def __init__(self, pods: Pods, id: str, config: pb.PodSandboxConfig) -> None:  # noqa: A002
        self.id = id
        self._pods = pods
        self._config = config
        self._made = 0

    def status(self) -> pb.PodSandboxStatusResponse:
        """What the engine says of it, in many words."""
        request = pb.PodSandboxStatusRequest(pod_sandbox_id=self.id, verbose=True)
        return self._pods.cri.pod_sandbox_status(request)

    def stays(self) -> bool:
        """Whether nobody stops or removes it, who may just be about to."""
        deadline = time.monotonic() + _TO_GO
        while self.is_there:
            if time.monotonic() > deadline:
                return True
            time.sleep(_POLL)
        return False

    @property
    def is_there(self) -> bool:
        """Whether nobody has stopped or removed it."""
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
        """Start the program in a container.

        Args:
            words: its arguments.
            env: the environment.
            answer: what a device plugin has answered for it.
            trusted: whether it has CAP_SYS_ADMIN, by which a request of its own is believed.
        """
        place, self._made = self._pods.place, self._made + 1
        name = f"verify-{self._made}"
        security = pb.LinuxContainerSecurityContext(
            namespace_options=self._config.linux.security_context.namespace_options,
            seccomp=pb.SecurityProfile(profile_type=pb.SecurityProfile.Unconfined),
            run_as_user=pb.Int64Value(value=0),  # the image may have another
            run_as_group=pb.Int64Value(value=0),
        )
        if trusted:
            security.capabilities.add_capabilities.append("SYS_ADMIN")
        program = pb.Mount(host_path=place.program, container_path=_INSIDE, readonly=True)
        config = pb.ContainerConfig(
            metadata=pb.ContainerMetadata(name=name),
            image=pb.ImageSpec(image=place.image),
            command=[_INSIDE, *words],
            working_dir="/",
            mounts=[program],
            log_path=f"{name}.log",
            linux=pb.LinuxContainerConfig(security_context=security),
        )
        _ask(config, env or {}, answer)
        request = pb.CreateContainerRequest(
            pod_sandbox_id=self.id, config=config, sandbox_config=self._config
        )
        made = self._pods.cri.create_container(request, timeout=_TO_MAKE).container_id
        self._pods.cri.start_container(
            pb.StartContainerRequest(container_id=made), timeout=_TO_MAKE
        )
        return Container(
            self._pods.cri, made, os.path.join(self._config.log_directory, config.log_path)
        )

    def run(self, *words: str, **asked: Any) -> Ran:
        """Start the program in a container and wait for its end, as :meth:`start` is asked."""
        container = self.start(*words, **asked)
        code = container.exit_code()
        return Ran(code, container.looks() if words[0] == "look" else ())


class Pods:
    """Pods, each for one piece of work. As a context none of them is left at the end.

    Args:
        cri: the engine.
        place: what they are made with.
        interrupts: the signals that may come.
    """

    def __init__(self, cri: Cri, place: Place, interrupts: Interrupts) -> None:
        self.cri = cri
        self.place = place
        self._interrupts = interrupts

    def __enter__(self) -> Self:
        self.remove_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._interrupts.ignore()
        self.remove_all()

    def attempt(self, work: Callable[[Pod], R]) -> R:
        """Do something with a pod of its own, which is removed after that.

        Args:
            work: what is done with it. It is done again if somebody removed the pod meanwhile.

        Raises:
            NotMade: somebody removed it each time.
            NotAsExpected: as ``work``.
            CriError: the engine refused something.
        """
        for _ in range(_ATTEMPTS):
            pod = self._run()
            try:
                return work(pod)
            except (CriRefused, NotAsExpected):
                if pod.stays():
                    raise
            finally:
                with contextlib.suppress(CriError):
                    self._remove(pod.id)
        raise NotMade(
            f"somebody removed the pod {_ATTEMPTS} times while it was looked at; a kubelet does "
            "with pods that it does not know: try again, when the node is less busy"
        )

    def remove_all(self) -> None:
        """Remove every pod of ours, also of earlier runs.

        Raises:
            CriError: the engine does not let it.
        """
        deadline = time.monotonic() + _TO_REMOVE
        while ours := self._ours():
            for pod in ours:
                try:
                    self._remove(pod)
                except CriRefused:
                    # Somebody else removes it; or a container of it is being made still, for a
                    # call that a signal has ended.
                    if time.monotonic() > deadline and pod in self._ours():
                        raise
            time.sleep(_POLL)

    def _ours(self) -> list[str]:
        known = pb.PodSandboxFilter(label_selector={LABEL: _OURS})
        items = self.cri.list_pod_sandbox(pb.ListPodSandboxRequest(filter=known)).items
        # There are engines that know no filter.
        return [pod.id for pod in items if pod.labels.get(LABEL) == _OURS]

    def _run(self) -> Pod:
        uid = str(uuid.uuid4())
        name = f"nvshim-verify-{uid[:8]}"
        namespaces = pb.NamespaceOption(network=pb.NODE, pid=pb.CONTAINER, ipc=pb.POD)
        config = pb.PodSandboxConfig(
            metadata=pb.PodSandboxMetadata(name=name, uid=uid, namespace=self.place.namespace),
            log_directory=os.path.join(self.place.directory, name),
            labels={LABEL: _OURS},
            linux=pb.LinuxPodSandboxConfig(
                cgroup_parent=_SLICE if self.place.systemd else _TOP,
                security_context=pb.LinuxSandboxSecurityContext(
                    namespace_options=namespaces,
                    seccomp=pb.SecurityProfile(profile_type=pb.SecurityProfile.Unconfined),
                ),
            ),
        )
        os.makedirs(config.log_directory, mode=0o700)
        request = pb.RunPodSandboxRequest(config=config, runtime_handler=self.place.handler)
        with self._interrupts.postponed():
            made = self.cri.run_pod_sandbox(request, timeout=_TO_MAKE).pod_sandbox_id
        return Pod(self, made, config)

    def _remove(self, pod: str) -> None:
        self.cri.stop_pod_sandbox(pb.StopPodSandboxRequest(pod_sandbox_id=pod), timeout=_TO_MAKE)
        self.cri.remove_pod_sandbox(
            pb.RemovePodSandboxRequest(pod_sandbox_id=pod), timeout=_TO_MAKE
        )


def find_image(cri: Cri) -> str:
    """The image that pods are made of: that of pause containers, or else the smallest.

    Returns:
        Its id.

    Raises:
        ImageMissing: there is none.
    """
    images: Sequence[pb.Image] = cri.list_images(pb.ListImagesRequest()).images
    if not images:
        raise ImageMissing("an image for the containers", found="the engine has none")

    def order(image: pb.Image) -> tuple[bool, bool, int]:
        names = [tag.rpartition(":")[0] for tag in image.repo_tags]
        return (not any(name.endswith(_PAUSE) for name in names), not image.pinned, image.size)

    return min(images, key=order).id


def _ask(
    config: pb.ContainerConfig, env: Mapping[str, str], answer: ContainerAllocateResponse | None
) -> None:
    """Add an environment, and what a kubelet makes of a plugin's answer."""
    given = dict(env)
    if answer is not None:
        given = {**answer.envs, **given}
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
    for key, value in given.items():
        config.envs.add(key=key, value=value.encode())
