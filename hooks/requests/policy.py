"""Policy: decide which part of a request is allowed, by its author and the container.

In a pod, the environment may come from the image, and annotations, mounts and variables from the
pod's author: a spec does not show who wrote what. UUIDs are not secret either, since procfs shows
them to every container. So a pod's request alone grants nothing; the grant is what the kubelet has
recorded for the container (:mod:`hooks.requests.kubelet_record`). Outside of Kubernetes, the user
who starts a container decides what it gets. The mode decides whom to trust:

============  =================  ==================  ==========================================
mode          environment,       privileged in       unprivileged in Kubernetes
              outside of         Kubernetes
              Kubernetes
============  =================  ==================  ==========================================
default       trusted            trusted             what the kubelet's record has
nvidia        trusted            trusted             trusted
privileged    if privileged      trusted             what the kubelet's record has
strict        not trusted        what the record     what the kubelet's record has
                                 has
============  =================  ==================  ==========================================

Rules
- In a trusted namespace everything is trusted in every mode.
- A list is granted as a whole or not at all, because it has one author. Only ``all`` is narrowed,
  to the GPUs that the kubelet granted, if any.
- Without a usable record (no kubelet, or its root is elsewhere), nothing was granted.
- ``none`` gives no GPU, so in the default mode a pod's environment may request it.
- Annotations and mounts of /dev/null are trusted outside of Kubernetes and in privileged
  containers. With ``accept-mounts = true`` such mounts are trusted in every pod, although the
  author of a pod can create them with a volume of type hostPath.
- Devices that an engine has put into the spec (CDI) stay, and get what belongs to them.
- Features that only variables can request (IMEX channels, GDS, MOFED, GDRCOPY, NVSwitch) need a
  trusted environment or the record, even if the GPUs come from elsewhere.
- Management devices (all devices of the node) need a trusted request and, in Kubernetes, a
  privileged container or a trusted namespace (mode ``nvidia`` needs neither).
- Configuring or monitoring MIG always needs a privileged container, and is an error otherwise, as
  with NVIDIA's runtime.
- A container is part of a pod if it has the annotations of a CRI, or a cgroup of the kubelet.
- The identity of pod and container, and the namespace, count only if all sources agree: an engine
  that passes on a pod's annotations also passes on imitations of its own. Only the kubelet creates
  the cgroup.
- Other vendors' devices that the environment names need a trusted environment or the record.
- After a denial, a container starts without any part of the driver, or fails, as configured. Both
  are logged.
- The sandbox container of a pod gets nothing. It needs no GPU, and a pod's annotations are meant
  for its other containers.
- Unsupported driver capabilities are removed from ``all`` and the default; to name one is an error,
  as with NVIDIA's runtime.
- Policy only removes.

A container is privileged if it has CAP_SYS_ADMIN in the bounding set, as in NVIDIA's toolkit, and
no user namespace, because in a user namespace that capability opens no device of the node.

Source: NVIDIA Container Toolkit, internal/config/image (privileged, visible devices),
cmd/nvidia-container-runtime-hook; containerd, internal/cri/annotations; CRI-O,
internal/factory/container (SpecAddAnnotations); kubelet, pkg/kubelet/cm/pod_container_manager.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from api.errors import one_line
from api.values import dataclass, replace
from hooks.config import Config, Denied, Mode
from hooks.errors import PrivilegeNeeded, RequestDenied, UnsupportedCapability
from hooks.ocispec import has_user_namespace, part
from hooks.requests.kubelet_record import KubeletRecord
from hooks.requests.places import NAMES, NAMESPACES, agreed
from hooks.requests.request import Request
from hooks.words import (
    CAPABILITIES,
    DEFAULT_CAPABILITIES,
    IMEX,
    AllDevices,
    Devices,
    Feature,
    NamedDevices,
    NoDevices,
    Origin,
    Void,
    items_of,
)


@dataclass(frozen=True, slots=True)
class Container:
    """The container that makes a request."""

    kubernetes: bool = False  # whether it is a container of a pod
    sandbox: bool = False  # whether it holds the pod's namespaces
    namespace: str = ""  # the pod's; "" if uncertain
    privileged: bool = False  # whether it could take a GPU by itself
    pod_uid: str = ""  # the pod's UID; "" if pod or container is uncertain
    name: str = ""  # its name in the pod; "" if the engine does not report it

    def __str__(self) -> str:
        kind = "privileged" if self.privileged else "unprivileged"
        if not self.kubernetes:
            return f"{kind} container"
        whose = f" in namespace {self.namespace}" if self.namespace else ""
        return f"{kind} container of a pod{whose}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The policy's decision: the allowed part of a request."""

    container: Container
    mode: str  # of the policy
    asked: Request
    allowed: Request
    denials: tuple[str, ...] = ()  # what was denied and why, for display
    notes: tuple[str, ...] = ()  # what was narrowed without being denied, for display
    # the kubelet's record of the container, for display; "" if it did not decide
    kubelet: str = ""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why ``allowed`` is less than ``asked``; empty if they are equal."""
        return (*self.denials, *self.notes)


# What containerd's CRI plugin and CRI-O write into the spec of each container of a pod.
_OF_CRI: Final = "io.kubernetes.cri"
_TYPES: Final = ("io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType")
_UIDS: Final = ("io.kubernetes.cri.sandbox-uid", "io.kubernetes.pod.uid")
_SANDBOX: Final = "sandbox"
# In the name of the kubelet's cgroup or slice for all pods, which is not configurable.
_OF_KUBELET: Final = "kubepods"
# The pod's UID in a cgroup path, from either cgroup driver; a static pod's is a digest.
_UID_IN_CGROUP: Final = re.compile(
    r"(?:^|[/-])pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?=[/.:]|$)"
)
_ADMIN: Final = "CAP_SYS_ADMIN"


def read_container(spec: Mapping[str, Any]) -> Container:
    """Read the container from its spec.

    Raises:
        MalformedSpec: a part of the spec has the wrong shape.
    """
    annotations = part(spec, "annotations", dict)
    path = part(spec, "linux", dict).get("cgroupsPath")
    cgroup = path if isinstance(path, str) else ""
    in_cgroup = [uid.replace("_", "-") for uid in _UID_IN_CGROUP.findall(cgroup)]
    names = {str(annotations[name]) for name in NAMES if name in annotations}
    return Container(
        # The cgroup is all that Kubernetes leaves in the spec of cri-dockerd's containers.
        kubernetes=any(name.startswith(_OF_CRI) for name in annotations) or _OF_KUBELET in cgroup,
        sandbox=any(annotations.get(name) == _SANDBOX for name in _TYPES),
        namespace=agreed(annotations, NAMESPACES),
        privileged=_is_privileged(spec),
        # With two different names, it is unknown whose record applies.
        pod_uid="" if len(names) > 1 else agreed(annotations, _UIDS, in_cgroup),
        name=agreed(annotations, NAMES),
    )


def _is_privileged(spec: Mapping[str, Any]) -> bool:
    capabilities = part(part(spec, "process", dict), "capabilities", dict)
    if _ADMIN not in part(capabilities, "bounding", list):
        return False
    return not has_user_namespace(spec)


def mounts_are_believed(config: Config) -> bool:
    """Whether mounts of /dev/null grant devices to a pod's unprivileged containers, too."""
    return config.accept_mounts is True or (
        config.mode == Mode.NVIDIA and config.accept_mounts is not False
    )


def needs_record(container: Container, config: Config) -> bool:
    """Whether the kubelet's record decides what a container gets."""
    in_pod = container.kubernetes and not container.sandbox
    return in_pod and not _trusts_environment(container, config)


def _trusts_environment(container: Container, config: Config) -> bool:
    if _is_in_trusted_namespace(container, config):
        return True
    return {
        Mode.NVIDIA: True,
        Mode.STRICT: False,
        Mode.PRIVILEGED: container.privileged,
        Mode.DEFAULT: container.privileged or not container.kubernetes,
    }[config.mode]


def _is_in_trusted_namespace(container: Container, config: Config) -> bool:
    return container.kubernetes and container.namespace in config.trusted_namespaces


def judge(
    request: Request,
    container: Container,
    config: Config,
    record: KubeletRecord | None = None,
) -> Verdict:
    """Return the verdict on a request; its ``allowed`` is at most ``request``.

    Args:
        record: what the kubelet granted to the container; None if that does not decide
            (:func:`needs_record`).

    Raises:
        RequestDenied: part of it is denied, and the configuration makes that an error.
        PrivilegeNeeded: a container that is not privileged asks to control MIG.
        UnsupportedCapability: a named driver capability is excluded by the configuration.
    """
    if container.sandbox:
        denied = "the sandbox container of a pod gets nothing"
        nothing = replace(
            request.without_nvidia(), cdi_devices=(), amd_devices="", intel_devices=""
        )
        return Verdict(container, config.mode, request, nothing, (denied,))
    if record is not None and not needs_record(container, config):
        record = None
    case = _Case(request, container, config, record)
    allowed = case.allowed()
    if case.denials and config.denied == Denied.FAIL:
        raise RequestDenied(
            f"{_asked(request)} for {_an(container)}", found="; ".join(case.denials), do=_DO
        )
    found = record.found if record is not None else ""
    return Verdict(
        container, config.mode, request, allowed, tuple(case.denials), tuple(case.notes), found
    )


_BY_VARIABLES: Final = frozenset({Feature.GDS, Feature.MOFED, Feature.GDRCOPY, Feature.NVSWITCH})
_STEERING_MIG: Final = frozenset({Feature.MIG_CONFIG, Feature.MIG_MONITOR})
_DO: Final = (
    "request the GPU in the pod's resources (nvidia.com/gpu), so that the kubelet gives it, or let "
    "[policy] trust this container: trusted-namespaces, or mode"
)


class _Case:
    """One request under the policy."""

    def __init__(
        self, request: Request, container: Container, config: Config, record: KubeletRecord | None
    ) -> None:
        self._request = request
        self._container = container
        self._config = config
        self._environment = _trusts_environment(container, config)
        self._record = KubeletRecord() if record is None else record
        self.denials: list[str] = []
        self.notes: list[str] = []

    def allowed(self) -> Request:
        request = self._request
        trusted = self._trusts(request.origin)
        changes: dict[str, Any] = {}
        devices = self._devices(trusted=trusted)
        if devices is None:
            self._deny(_asked(request), origin=request.origin)
            request = request.without_nvidia()
        else:
            changes |= {"devices": devices, **self._beside_devices(trusted=trusted)}
        if not (
            self._trusts(request.cdi_origin)
            or self._record.cdi_devices.issuperset(request.cdi_devices)
        ):
            self._deny(", ".join(request.cdi_devices), origin=request.cdi_origin)
            changes["cdi_devices"] = ()
        for name, variable in _OTHER_VENDORS.items():
            value: str = getattr(request, name)
            given: frozenset[str] = getattr(self._record, name)
            if value and not self._environment and not given.issuperset(items_of(value)):
                self._deny(f"{variable}={value}")
                changes[name] = ""
        allowed = replace(request, **changes)
        if not allowed.wants_driver:
            return allowed.without_nvidia()
        return replace(allowed, capabilities=self._capabilities(request.capabilities))

    def _trusts(self, origin: str) -> bool:
        """Whether a place of that origin decides what the container gets."""
        container = self._container
        free = not container.kubernetes or container.privileged
        match origin:
            case Origin.DOCKER:
                # Docker starts no containers of pods; in a pod, NVIDIA's runtime adds the hook to
                # every spec.
                return not container.kubernetes or self._environment
            case Origin.MOUNTS:
                return free or mounts_are_believed(self._config) or self._environment
            case Origin.ANNOTATIONS:
                return free or self._environment
            case Origin.SPEC:
                return True
        return self._environment

    def _devices(self, *, trusted: bool) -> Devices | None:
        """Return the allowed devices; None if the requested ones are denied."""
        request, record = self._request, self._record
        match request.devices:
            case Void():
                granted = True
            case NoDevices():
                by_default = self._config.mode == Mode.DEFAULT and request.origin != Origin.MOUNTS
                granted = by_default or record.gave_anything
            case AllDevices():
                if record.devices and not (trusted or record.every):
                    given = ", ".join(map(str, record.devices))
                    self.notes.append(one_line(f"{_asked(request)}: {given}, as the kubelet gave"))
                    return NamedDevices(record.devices)
                granted = record.every
            case NamedDevices(names):
                granted = record.every or set(names) <= set(record.devices)
        return request.devices if trusted or granted else None

    def _beside_devices(self, *, trusted: bool) -> dict[str, Any]:
        """Return the allowed features and channels, if the devices are allowed."""
        request, record = self._request, self._record
        features, channels = request.features, request.imex_channels
        if channels != () and self._config.ignore_imex:
            self.notes.append("requests of IMEX channels are ignored, as configured")
            channels = ()

        def is_granted(what: str) -> bool:
            return self._environment or (trusted and what not in request.only_variables)

        for feature in sorted((features & _BY_VARIABLES) - record.features):
            if not is_granted(feature):
                self._deny(feature)
                features -= {feature}
        if channels != () and not (is_granted(IMEX) or record.has_channels(channels)):
            numbers = "every one" if channels is None else ", ".join(map(str, channels))
            self._deny(f"IMEX channels ({numbers})")
            channels = ()
        if Feature.MANAGEMENT in features and not self._may_manage(trusted=trusted):
            is_manager = self._container.privileged or not self._container.kubernetes
            self._deny("management devices", "" if is_manager else _NOT_MANAGER)
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

    def _may_manage(self, *, trusted: bool) -> bool:
        container, config = self._container, self._config
        free = config.mode == Mode.NVIDIA or not container.kubernetes or container.privileged
        return trusted and (free or _is_in_trusted_namespace(container, config))

    def _capabilities(self, asked: frozenset[str]) -> frozenset[str]:
        supported = frozenset(self._config.supported_capabilities)
        missing = ", ".join(sorted(asked - supported))
        if not missing:
            return asked
        if asked not in {CAPABILITIES, DEFAULT_CAPABILITIES}:
            raise UnsupportedCapability(
                f"NVIDIA_DRIVER_CAPABILITIES with {', '.join(sorted(asked))}",
                found=f"{missing} is not allowed on this node",
                do=f"use some of {', '.join(sorted(supported)) or 'none'}, or extend "
                "supported-driver-capabilities",
            )
        self.notes.append(f"not supported, as configured: {missing}")
        return asked & supported

    def _deny(self, what: str, why: str = "", *, origin: str = Origin.ENVIRONMENT) -> None:
        container, mode = self._container, f'mode "{self._config.mode}"'
        if not container.kubernetes:
            why = why or f"the environment is not trusted in {mode}"
        elif not why:
            both = f"{mode} and accept-mounts do not trust"
            trusts = both if origin == Origin.MOUNTS else f"{mode} does not trust"
            why = f"no device plugin gave it to {_an(container)}, which {trusts}"
            why += f"; {self._record.found}"
        self.denials.append(one_line(f"{what}: {why}"))


_NOT_MANAGER: Final = "in a pod they are for privileged containers and trusted namespaces"
_OTHER_VENDORS: Final = {
    "amd_devices": "AMD_VISIBLE_DEVICES",
    "intel_devices": "INTEL_VISIBLE_DEVICES",
}


def _asked(request: Request) -> str:
    """Return the NVIDIA part of a request, in its own words."""
    return request.source or ", ".join(_words(request)) or "nothing"


def _words(request: Request) -> Iterable[str]:
    yield from sorted(request.features)
    yield from request.cdi_devices


def _an(container: Container) -> str:
    return f"{'a' if container.privileged else 'an'} {container}"
