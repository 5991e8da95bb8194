"""Policy: which part of a request a container may have, by its author and the container.

Annotations and CDI names are written by the creator of the container (a kubelet's device plugin, an
operator), and Docker's ``--gpus`` by a person. The environment may come from the image: a spec does
not show the difference. So the mode decides whether the environment is trusted:

============  =================  ==================  ==========================================
mode          outside of         privileged in       unprivileged in Kubernetes
              Kubernetes         Kubernetes
============  =================  ==================  ==========================================
default       yes                yes                 UUIDs in full, and ``none``: no image knows
                                                     a node's UUIDs, a kubelet's plugin does
nvidia        yes                yes                 yes
privileged    if privileged      yes                 no
strict        no                 no                  no
============  =================  ==================  ==========================================

Rules
- In a trusted namespace the environment is trusted in every mode.
- A list is trusted as a whole or not at all; it has one author.
- Mounts of /dev/null are made by a device plugin, but also by the author of a pod with a volume of
  type hostPath. So those of an unprivileged container of a pod are trusted only with
  ``accept-mounts = true``, or where the environment is trusted.
- Features that variables alone request (IMEX channels, GDS, MOFED, GDRCOPY, NVSwitch) need a
  trusted environment, even if the GPUs come from elsewhere. In the default mode, those that device
  plugins set by variables come with GPUs: GDS, MOFED, GDRCOPY and IMEX channel 0.
- Management devices, which are all devices of the node, need a trusted request and, in Kubernetes,
  a privileged container or a trusted namespace (mode ``nvidia`` needs neither).
- Configuring or monitoring MIG needs a privileged container, everywhere, or is an error, as with
  NVIDIA's runtime.
- A container is part of a pod by the annotations of a CRI, or by a cgroup of the kubelet's.
- Other vendors' devices that the environment names need a trusted environment.
- A container whose request is denied starts without anything of the driver, or fails, as
  configured. Both are logged.
- The sandbox container of a pod gets nothing. It runs nothing, and a pod's annotations are meant
  for its other containers.
- Unsupported driver capabilities are removed from ``all`` and from the default; naming one is an
  error, as with NVIDIA's runtime.
- Policy only ever removes.

A container is privileged if it has CAP_SYS_ADMIN in the bounding set, as in NVIDIA's toolkit, and
no user namespace: there, that capability opens no device of the node.

Source: NVIDIA Container Toolkit, internal/config/image (privileged, visible devices),
cmd/nvidia-container-runtime-hook; containerd, internal/cri/annotations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from api.errors import one_line
from hooks.config import Config, Denied, Mode
from hooks.errors import PrivilegeNeeded, RequestDenied, UnsupportedCapability
from hooks.ocispec import has_user_namespace, part
from hooks.requests.request import Request
from hooks.words import (
    CAPABILITIES,
    DEFAULT_CAPABILITIES,
    IMEX,
    AllDevices,
    Feature,
    NamedDevices,
    NoDevices,
    Origin,
    Void,
)


@dataclass(frozen=True, slots=True)
class Container:
    """The container of a request.

    Attributes:
        kubernetes: whether it is a container of a pod.
        sandbox: whether it is the one that holds the pod's namespaces.
        namespace: the pod's; "" if it is not known.
        privileged: whether it could take a GPU by itself.
    """

    kubernetes: bool = False
    sandbox: bool = False
    namespace: str = ""
    privileged: bool = False

    def __str__(self) -> str:
        kind = "privileged" if self.privileged else "unprivileged"
        if not self.kubernetes:
            return f"{kind} container"
        whose = f" in namespace {self.namespace}" if self.namespace else ""
        return f"{kind} container of a pod{whose}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of policy: the allowed part of a request.

    Attributes:
        mode: of the policy.
        denials: what was denied and why, for people.
        notes: what was narrowed without being denied, for people.
    """

    container: Container
    mode: str
    asked: Request
    allowed: Request
    denials: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why ``allowed`` is less than ``asked``; empty if it is not."""
        return (*self.denials, *self.notes)


# What containerd's CRI plugin and CRI-O write into the spec of each container of a pod.
_OF_CRI: Final = "io.kubernetes.cri"
_TYPES: Final = ("io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType")
_NAMESPACES: Final = ("io.kubernetes.cri.sandbox-namespace", "io.kubernetes.cri-o.Namespace")
_SANDBOX: Final = "sandbox"
# In the name of the kubelet's cgroup, or slice, of all pods; it cannot be configured.
_OF_KUBELET: Final = "kubepods"
_ADMIN: Final = "CAP_SYS_ADMIN"


def read_container(spec: Mapping[str, Any]) -> Container:
    """The container of a spec.

    Raises:
        MalformedSpec: a part of the spec has the wrong shape.
    """
    annotations = part(spec, "annotations", dict)
    namespace = next((annotations[name] for name in _NAMESPACES if name in annotations), "")
    return Container(
        kubernetes=any(name.startswith(_OF_CRI) for name in annotations) or _is_in_pod(spec),
        sandbox=any(annotations.get(name) == _SANDBOX for name in _TYPES),
        namespace=str(namespace),
        privileged=_is_privileged(spec),
    )


def _is_in_pod(spec: Mapping[str, Any]) -> bool:
    """Whether the cgroup is one of a kubelet's, as for a pod whose containers Docker makes.

    cri-dockerd starts them so, and Docker writes nothing else of Kubernetes into the spec.
    """
    path = part(spec, "linux", dict).get("cgroupsPath")
    return isinstance(path, str) and _OF_KUBELET in path


def _is_privileged(spec: Mapping[str, Any]) -> bool:
    capabilities = part(part(spec, "process", dict), "capabilities", dict)
    if _ADMIN not in part(capabilities, "bounding", list):
        return False
    return not has_user_namespace(spec)


def mounts_are_believed(config: Config) -> bool:
    """Whether mounts of /dev/null give devices to unprivileged containers of pods, too."""
    return config.accept_mounts is True or (
        config.mode == Mode.NVIDIA and config.accept_mounts is not False
    )


def judge(request: Request, container: Container, config: Config) -> Verdict:
    """The verdict on a request; its ``allowed`` is at most ``request``.

    Raises:
        RequestDenied: something may not be had, and that is to be an error.
        PrivilegeNeeded: MIG is to be steered by a container that is not privileged.
        UnsupportedCapability: a driver capability is named that may not be had.
    """
    if container.sandbox:
        denied = "the sandbox container of a pod is given nothing"
        nothing = replace(
            request.without_nvidia(), cdi_devices=(), amd_devices="", intel_devices=""
        )
        return Verdict(container, config.mode, request, nothing, (denied,))
    case = _Case(request, container, config)
    allowed = case.allowed()
    if case.denials and config.denied == Denied.FAIL:
        raise RequestDenied(
            f"{_asked(request)} for {_an(container)}", found="; ".join(case.denials), do=_DO
        )
    return Verdict(container, config.mode, request, allowed, tuple(case.denials), tuple(case.notes))


_OF_PLUGINS: Final = frozenset({Feature.GDS, Feature.MOFED, Feature.GDRCOPY})
"""What device plugins ask for by variables, with the GPUs that they give."""
_CHANNELS_OF_PLUGINS: Final = (0,)
"""The only channel that their configuration may name (``imex.channelIDs``)."""
_STEERING_MIG: Final = frozenset({Feature.MIG_CONFIG, Feature.MIG_MONITOR})
_DO: Final = (
    "ask the kubelet for the GPU (a device plugin names its UUID), or let [policy] believe this "
    "container: trusted-namespaces, or mode"
)


class _Case:
    """One request before the policy."""

    def __init__(self, request: Request, container: Container, config: Config) -> None:
        self._request = request
        self._container = container
        self._config = config
        self._trusted = container.namespace in config.trusted_namespaces and container.kubernetes
        self._environment = (
            self._trusted
            or {
                Mode.NVIDIA: True,
                Mode.STRICT: False,
                Mode.PRIVILEGED: container.privileged,
                Mode.DEFAULT: container.privileged or not container.kubernetes,
            }[config.mode]
        )
        self.denials: list[str] = []
        self.notes: list[str] = []

    def allowed(self) -> Request:
        request = self._request
        trusted = self._believes(request.origin)
        changes: dict[str, Any] = {}
        if not self._may_have_devices(trusted):
            self._deny(_asked(request), _WHY.get(request.origin, ""))
            request = request.without_nvidia()
        else:
            changes |= self._beside_devices(trusted)
        if request.cdi_devices and not self._believes(request.cdi_origin):
            self._deny(", ".join(request.cdi_devices), _WHY.get(request.cdi_origin, ""))
            changes["cdi_devices"] = ()
        for name, variable in _OTHER_VENDORS.items():
            if getattr(request, name) and not self._environment:
                self._deny(f"{variable}={getattr(request, name)}")
                changes[name] = ""
        allowed = replace(request, **changes)
        if not allowed.wants_driver:
            return allowed.without_nvidia()
        return replace(allowed, capabilities=self._capabilities(request.capabilities))

    def _believes(self, origin: str) -> bool:
        container = self._container
        if origin == Origin.DOCKER:
            # Docker starts no containers of pods: there, a hook of NVIDIA's is in every spec.
            return not container.kubernetes or self._environment
        if origin == Origin.MOUNTS:
            free = not container.kubernetes or container.privileged
            return free or mounts_are_believed(self._config) or self._environment
        return origin in {Origin.ANNOTATIONS, Origin.SPEC} or self._environment

    def _may_have_devices(self, trusted: bool) -> bool:  # noqa: FBT001 - says who is asking
        match self._request.devices:
            case Void():
                return True
            case NoDevices():
                return trusted or self._may_say_uuids()
            case AllDevices():
                return trusted
            case NamedDevices(names):
                return trusted or (self._may_say_uuids() and all(map(_is_whole_uuid, names)))

    def _may_say_uuids(self) -> bool:
        return self._config.mode == Mode.DEFAULT and self._request.origin != Origin.MOUNTS

    def _beside_devices(self, trusted: bool) -> dict[str, Any]:  # noqa: FBT001 - as above
        """The allowed features and channels, if the devices are allowed."""
        request = self._request
        features, channels = request.features, request.imex_channels
        if channels != () and self._config.ignore_imex:
            self.notes.append("requests of IMEX channels are ignored, as configured")
            channels = ()
        has_gpus = isinstance(request.devices, AllDevices | NamedDevices)
        if not (trusted or has_gpus) and (features or channels != ()):
            named = [*sorted(features), *(["IMEX channels"] if channels != () else [])]
            self._deny(f"{', '.join(named)} without a GPU")
            return {"features": frozenset(), "imex_channels": ()}
        if not self._environment:
            features, channels = self._without_what_no_kubelet_says(features, channels, trusted)
        if Feature.MANAGEMENT in features and not self._may_manage(trusted):
            self._deny("management devices", _NOT_MANAGER if trusted else "")
            features -= {Feature.MANAGEMENT}
        steering = features & _STEERING_MIG
        if steering and not self._container.privileged:
            raise PrivilegeNeeded(
                f"{', '.join(sorted(steering))} for {_an(self._container)}",
                found=f"it has no {_ADMIN}",
                do="make the container privileged, or leave NVIDIA_MIG_CONFIG_DEVICES and "
                "NVIDIA_MIG_MONITOR_DEVICES away",
            )
        return {"features": features, "imex_channels": channels}

    def _without_what_no_kubelet_says(
        self,
        features: frozenset[str],
        channels: tuple[int, ...] | None,
        trusted: bool,  # noqa: FBT001 - as above
    ) -> tuple[frozenset[str], tuple[int, ...] | None]:
        """The features that remain if those of the untrusted environment are removed."""

        def only_environment(what: str) -> bool:
            return not trusted or what in self._request.only_variables

        # Device plugins set variables, too, and only the default mode trusts them.
        listens = self._config.mode == Mode.DEFAULT
        may_follow = _OF_PLUGINS if listens else frozenset()
        for feature in sorted(features & (_OF_PLUGINS | {Feature.NVSWITCH}) - may_follow):
            if only_environment(feature):
                self._deny(feature)
                features -= {feature}
        if channels != () and only_environment(IMEX):
            if channels is None:
                self._deny("every IMEX channel")
                channels = ()
            elif not (listens and channels == _CHANNELS_OF_PLUGINS):
                self._deny("IMEX channels other than 0" if listens else "IMEX channels")
                channels = ()
        return features, channels

    def _may_manage(self, trusted: bool) -> bool:  # noqa: FBT001 - as above
        container = self._container
        free = self._config.mode == Mode.NVIDIA or not container.kubernetes
        return trusted and (free or container.privileged or self._trusted)

    def _capabilities(self, asked: frozenset[str]) -> frozenset[str]:
        supported = frozenset(self._config.supported_capabilities)
        missing = ", ".join(sorted(asked - supported))
        if not missing:
            return asked
        if asked not in {CAPABILITIES, DEFAULT_CAPABILITIES}:
            raise UnsupportedCapability(
                f"NVIDIA_DRIVER_CAPABILITIES with {', '.join(sorted(asked))}",
                found=f"{missing} may not be had on this node",
                do=f"use some of {', '.join(sorted(supported)) or 'none'}, or extend "
                "supported-driver-capabilities",
            )
        self.notes.append(f"not supported, as configured: {missing}")
        return asked & supported

    def _deny(self, what: str, why: str = "") -> None:
        mode = f'in mode "{self._config.mode}"'
        if not self._container.kubernetes:
            unbelieved = f"the environment is not trusted {mode}"
        else:
            unbelieved = (
                f"the image may have set it, and {_an(self._container)} is not trusted {mode}"
            )
        self.denials.append(one_line(f"{what}: {why or unbelieved}"))


_WHY: Final = {
    Origin.MOUNTS: "the author of a pod can make such mounts, and accept-mounts does not say that "
    "they are trusted in unprivileged containers of pods"
}
_NOT_MANAGER: Final = "in a pod they are for privileged containers and trusted namespaces"
_OTHER_VENDORS: Final = {
    "amd_devices": "AMD_VISIBLE_DEVICES",
    "intel_devices": "INTEL_VISIBLE_DEVICES",
}


_UUID_LENGTH: Final = len("GPU-00000000-0000-0000-0000-000000000000")


def _is_whole_uuid(name: object) -> bool:
    """Whether a device is named by all of a UUID; a name may be the beginning of one.

    "MIG-GPU-…/1/0" is how drivers before 470 name a MIG device: by its GPU's UUID.
    """
    text = str(name)
    if text.startswith("MIG-GPU-"):
        text = text.removeprefix("MIG-").partition("/")[0]
    return text.startswith(("GPU-", "MIG-")) and len(text) == _UUID_LENGTH


def _asked(request: Request) -> str:
    """NVIDIA's devices of a request, in the words of the request."""
    return request.source or ", ".join(_words(request)) or "nothing"


def _words(request: Request) -> Iterable[str]:
    yield from sorted(request.features)
    yield from request.cdi_devices


def _an(container: Container) -> str:
    return f"{'a' if container.privileged else 'an'} {container}"
