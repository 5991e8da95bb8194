"""The places in an OCI spec where a request can be written.

:data:`PLACES` is the only table of them. :mod:`hooks.requests.prefilter` finds requests with it,
and :mod:`hooks.requests.request` parses them. Both read it in order, so they agree.

============================================  ===========  ==================================
place                                         origin       form
============================================  ===========  ==================================
annotations ``cdi.k8s.io/…`` (the prefixes    annotations  full CDI names; the default kind
are configured), by name                                   does not apply to them
annotation ``nvidia.cdi.k8s.io/container.C``  annotations  the same; of the first that there is
of container C, ``…/pod`` or                               (only in trusted namespaces)
``nvidia.cdi.k8s.io``
mounts of /dev/null on                        mounts       a name; or ``cdi/VENDOR/CLASS/NAME``,
/var/run/nvidia-container-devices/NAME                     ``cdi/VENDOR/CLASS=NAME``, ``imex/0``
(if accept-mounts)
a hook of containerd's clients (``ctr run     spec         indices, UUIDs, ``all``
--gpus``): ``nvidia-container-cli configure``
swarm variables that are set (configured)     environment  names
NVIDIA_VISIBLE_DEVICES                        environment  names, or ``void``
legacy image: CUDA_VERSION is set, and        environment  all GPUs
NVIDIA_REQUIRE_CUDA and the above are not
============================================  ===========  ==================================

The table omits what does not compete with it: AMD_VISIBLE_DEVICES and INTEL_VISIBLE_DEVICES
(:func:`vendor_text`), and NVIDIA's hooks, which the engine removes from the spec wherever they are
(:class:`NvidiaHooks`).

A pod's author writes the annotations of NVIDIA's toolkit. In an untrusted namespace they do not
count, so a later place decides.

Docker's ``--gpus`` sets NVIDIA_VISIBLE_DEVICES and adds NVIDIA's hook to the prestart hooks.
With that hook, the environment has the origin docker, and NVIDIA_VISIBLE_DEVICES comes before the
swarm variables.

Source: NVIDIA Container Toolkit, internal/config/image, cmd/nvidia-container-runtime-hook and
cmd/nvidia-ctk-installer/container/runtime/nri.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from api.values import dataclass
from hooks.config import Config
from hooks.ocispec import misshapen, part, parts, variables_of
from hooks.requests.oci_hooks import LISTS as HOOK_LISTS
from hooks.requests.oci_hooks import ClientRequest, client_request, is_dockers, is_nvidia_hook
from hooks.words import Origin, items_of

MOUNTS: Final = "/var/run/nvidia-container-devices"
"""Mounts of /dev/null below this directory name devices."""
# Every spelling of such a path contains it.
_MOUNTS_NAME: Final = posixpath.basename(MOUNTS)
_MOUNTS_PATH: Final = MOUNTS.split("/")[1:]

NODES: Final = "/dev/nvidia"
"""The common prefix of the paths of NVIDIA's device nodes."""
GPU_NODES: Final = (NODES, "/dev/dri/", "/dev/kfd")
"""The prefixes of the paths of any vendor's GPU nodes."""

DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
CUDA_VERSION: Final = "CUDA_VERSION"
REQUIRE_CUDA: Final = "NVIDIA_REQUIRE_CUDA"
AMD_DEVICES: Final = "AMD_VISIBLE_DEVICES"
INTEL_DEVICES: Final = "INTEL_VISIBLE_DEVICES"
CAPABILITIES: Final = "NVIDIA_DRIVER_CAPABILITIES"

# What containerd's CRI plugin and CRI-O write into the spec of each container of a pod.
NAMESPACES: Final = (
    "io.kubernetes.cri.sandbox-namespace",
    "io.kubernetes.pod.namespace",
    "io.kubernetes.cri-o.Namespace",
)
NAMES: Final = ("io.kubernetes.cri.container-name", "io.kubernetes.container.name")
_TOOLKIT: Final = "nvidia.cdi.k8s.io"

VOID: Final = "void"
"""An item that, anywhere in a list of names, makes the list request nothing."""
GPU_KIND: Final = "nvidia.com/gpu"
"""The kind of names without one, unless the configuration has another default."""


@dataclass(frozen=True, slots=True)
class NvidiaHooks:
    """NVIDIA's hooks in a spec."""

    present: bool  # whether there is any
    by_docker: bool  # whether Docker's --gpus has added one
    client: ClientRequest | None  # the request of a containerd client in one

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> NvidiaHooks:
        """Find NVIDIA's hooks in a spec.

        Raises:
            MalformedSpec: a list of hooks is not a list.
        """
        hooks = part(spec, "hooks", dict)
        if not hooks:
            return _NO_HOOKS
        listed = {name: part(hooks, name, list, "hooks.") for name in HOOK_LISTS}
        each = [hook for entries in listed.values() for hook in entries]
        return cls(
            any(map(is_nvidia_hook, each)),
            any(map(is_dockers, listed["prestart"])),
            next(filter(None, map(client_request, each)), None),
        )


_NO_HOOKS: Final = NvidiaHooks(present=False, by_docker=False, client=None)


@dataclass(frozen=True, slots=True)
class SpecView:
    """The parts of a spec that can contain a request."""

    spec: Mapping[str, Any]
    variables: Mapping[str, str]  # the process's, each with its last value
    hooks: NvidiaHooks

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> SpecView:
        """Read a spec.

        Raises:
            MalformedSpec: the environment or the hooks have the wrong shape.
        """
        return cls(spec, variables_of(spec), NvidiaHooks.of(spec))


@dataclass(frozen=True, slots=True)
class DeviceText:
    """The device names in one place."""

    items: tuple[str, ...]  # the names, in order, for hooks.requests.naming
    origin: str  # of Origin
    source: str  # the place, for messages
    kind: str = GPU_KIND  # of names without one
    channels: tuple[str, ...] = ()  # IMEX channels, if separate from the names

    @property
    def is_empty(self) -> bool:
        """Whether the place requests nothing. It still decides: no later place counts."""
        return not self.channels and (not self.items or VOID in self.items)


def vendor_text(variables: Mapping[str, str], name: str) -> str:
    """Return what another vendor's variable requests; "" for nothing."""
    value = variables.get(name, "").strip()
    items = set(items_of(value))
    return "" if items <= {"none"} or VOID in items else value


def is_legacy(variables: Mapping[str, str]) -> bool:
    """Whether the image is older than NVIDIA_VISIBLE_DEVICES."""
    return bool(variables.get(CUDA_VERSION)) and not variables.get(REQUIRE_CUDA)


# -- the table -------------------------------------------------------------------------------


def _in_annotations(view: SpecView, config: Config) -> DeviceText | None:
    annotations = part(view.spec, "annotations", dict)
    chosen = sorted(name for name in annotations if name.startswith(config.annotation_prefixes))
    if not chosen:
        return None
    if not all(isinstance(annotations[name], str) for name in chosen):
        raise misshapen("annotations", "an object of strings")
    items = [item for name in chosen for item in _cdi_names(annotations[name])]
    if not items:
        return None
    source = " ".join(f"{name}={annotations[name]}" for name in chosen)
    return DeviceText(tuple(items), Origin.ANNOTATIONS, source, config.default_kind)


def _in_toolkit_annotations(view: SpecView, config: Config) -> DeviceText | None:
    annotations = part(view.spec, "annotations", dict)
    if agreed(annotations, NAMESPACES) not in config.trusted_namespaces:
        return None
    scopes = (f"/container.{agreed(annotations, NAMES)}", "/pod", "")
    name = next((each for scope in scopes if (each := _TOOLKIT + scope) in annotations), None)
    if name is None:
        return None
    if not isinstance(annotations[name], str):
        raise misshapen("annotations", "an object of strings")
    items = _cdi_names(annotations[name])
    source = f"{name}={annotations[name]}"
    return (
        DeviceText(tuple(items), Origin.ANNOTATIONS, source, config.default_kind) if items else None
    )


def agreed(annotations: Mapping[str, Any], names: Iterable[str], others: Iterable[str] = ()) -> str:
    """Return the common value of these annotations; "" if they differ."""
    said = {str(annotations[name]) for name in names if name in annotations} | set(others)
    return said.pop() if len(said) == 1 else ""


def _cdi_names(value: str) -> list[str]:
    """Return the items of an annotation, from the first one that has a kind or a part of one.

    An item without a kind ("1", "all") is not a CDI name. NVIDIA's runtime and the engines ignore
    it.
    """
    items = items_of(value)
    while items and "=" not in items[0] and "/" not in items[0]:
        del items[0]
    return items


def _in_mounts(view: SpecView, config: Config) -> DeviceText | None:
    below = list(_below_mounts(view.spec)) if config.accept_mounts else []
    if not below:
        return None
    items: list[str] = []
    channels: list[str] = []
    for path in below:
        match path:
            case ["imex", *channel]:
                channels.append("/".join(channel))
            case ["cdi", vendor, kind, name]:
                items.append(f"{vendor}/{kind}={name}")
            case ["cdi", *rest]:
                items.append("/".join(rest))
            case _:
                items.append("/".join(path))
    # Each mount is a separate name: the kind of one does not apply to the next.
    items.sort(key=lambda item: "=" in item)
    source = f"mounts below {MOUNTS}: {', '.join(map('/'.join, below))}"
    return DeviceText(
        tuple(items), Origin.MOUNTS, source, config.default_kind, channels=tuple(channels)
    )


def _below_mounts(spec: Mapping[str, Any]) -> Iterator[list[str]]:
    for mount in parts(spec, "mounts", dict):
        destination = mount.get("destination")
        if not isinstance(destination, str) or _MOUNTS_NAME not in destination:
            continue
        path = posixpath.normpath(f"/{destination}").lstrip("/").split("/")
        top = len(_MOUNTS_PATH)
        if mount.get("source") == "/dev/null" and path[:top] == _MOUNTS_PATH and len(path) > top:
            yield path[top:]


def _in_client_hook(view: SpecView, _: Config) -> DeviceText | None:
    client = view.hooks.client
    if client is None:
        return None
    source = f"hook nvidia-container-cli configure --device={','.join(client.devices)}"
    return DeviceText(client.devices or ("none",), Origin.SPEC, source)


def _in_environment(view: SpecView, config: Config) -> DeviceText | None:
    variables = view.variables
    origin = Origin.DOCKER if view.hooks.by_docker else Origin.ENVIRONMENT
    usual = [DEVICES] if DEVICES in variables else []
    swarm = [name for name in config.swarm_resources if name in variables]
    # Docker's --gpus sets the usual variable; any other may be the image's.
    chosen = (usual or swarm) if origin == Origin.DOCKER else (swarm or usual)
    if not chosen:
        if not is_legacy(variables):
            return None
        return DeviceText((f"{GPU_KIND}=all",), origin, f"legacy image: {CUDA_VERSION} is set")
    items = [item for name in chosen for item in items_of(variables[name])]
    source = " ".join(f"{name}={variables[name]}" for name in chosen)
    return DeviceText(tuple(items), origin, source, config.default_kind)


PLACES: Final[tuple[Callable[[SpecView, Config], DeviceText | None], ...]] = (
    _in_annotations, _in_toolkit_annotations, _in_mounts, _in_client_hook, _in_environment,
)  # fmt: skip
"""The rows of the table, in order. A row returns None if the spec has nothing in its place."""


def device_texts(view: SpecView, config: Config) -> Iterator[DeviceText]:
    """Yield the content of each place, in order.

    Each place is parsed only when reached: a device plugin that mounts device names sets the
    variable to something that is not a name.

    Raises:
        MalformedSpec: the place has the wrong shape.
    """
    for place in PLACES:
        text = place(view, config)
        if text is not None:
            yield text
