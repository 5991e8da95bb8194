"""What a container asks for, and who says so: read from its spec.

Where devices are named; the first that names one decides which of NVIDIA's the container asks
for, and likewise which of other vendors' by CDI name. A GPU of NVIDIA's that a CDI file gives
(``k8s.device-plugin.nvidia.com/gpu=…``) decides as well. How they are named:
:mod:`hooks.requests.naming`.

============================================  ===========  ==================================
place                                         origin       form
============================================  ===========  ==================================
annotations ``cdi.k8s.io/…`` (the prefixes    annotations  CDI names, in full: the default kind
are configured), by name                                   is not for them
mounts of /dev/null on                        mounts       a name; or ``cdi/VENDOR/CLASS/NAME``,
/var/run/nvidia-container-devices/NAME                     ``cdi/VENDOR/CLASS=NAME``, ``imex/0``
(if accept-mounts)
swarm variables that are set (configured)     environment  names
NVIDIA_VISIBLE_DEVICES                        environment  names, or ``void``
legacy image: CUDA_VERSION is set, and        environment  all GPUs
NVIDIA_REQUIRE_CUDA and the above are not
============================================  ===========  ==================================

Docker's ``--gpus`` sets NVIDIA_VISIBLE_DEVICES, and adds NVIDIA's hook to the prestart hooks:
that hook makes a request of the environment one of origin docker, in which that variable comes
before a swarm's. Wherever the hook is, it is
taken out of the spec, even if nothing is asked (:func:`hooks.edits.mutation.apply`).

What is honoured if anything of NVIDIA's is asked, wherever it was:

==================================  =====================================================
NVIDIA_DRIVER_CAPABILITIES          a comma list: ``all`` anywhere is all of them; unset or
                                    without an item ``utility,compute``, but all if unset in
                                    a legacy image; an unknown word is an error
NVIDIA_REQUIRE_… (no _JETPACK…)     requirements, unless NVIDIA_DISABLE_REQUIRE is true. A
                                    legacy image requires the CUDA of its CUDA_VERSION
NVIDIA_GDS, _MOFED, _GDRCOPY,       ``enabled`` is a feature
_NVSWITCH
NVIDIA_MIG_CONFIG_DEVICES,          ``all`` is a feature; nothing, ``none`` and ``void`` are
NVIDIA_MIG_MONITOR_DEVICES          not; anything else is an error
NVIDIA_IMEX_CHANNELS                numbers, or ``all``, unless a mount or CDI name has said
==================================  =====================================================

AMD_VISIBLE_DEVICES and INTEL_VISIBLE_DEVICES are taken as they are, always of the environment.

A variable that is set twice has its last value, as the process will see it. Parsing is total:
every spec gives a request or one typed error.

containerd and Docker can apply CDI specs themselves, and then NVIDIA_VISIBLE_DEVICES is
``void`` at its end. Without an annotation that is all there is, and nothing is left to do. With
one, the same devices are given, and :func:`hooks.edits.mutation.apply` adds only what is not there.

This module is light, as :mod:`hooks.requests.glance` is, which looks first whether it is needed at
all: no dataclasses, enum, re or typing.

Source: NVIDIA Container Toolkit, internal/config/image and cmd/nvidia-container-runtime-hook;
its user guide, "Environment variables". Where they differ from one another, from this, and
why: docs/architecture.md, "Requests".
"""

from __future__ import annotations

from hooks.errors import UnknownCapability
from hooks.requests.glance import (
    AMD_DEVICES,
    CUDA_VERSION,
    INTEL_DEVICES,
    NOTHING,
)
from hooks.requests.glance import (
    CAPABILITIES as _CAPABILITIES,
)
from hooks.requests.names import (
    AllDevices,
    DeviceName,
    Devices,
    Feature,
    GpuBusId,
    GpuIndex,
    GpuUuid,
    MigIndex,
    MigInstance,
    MigUuid,
    NamedDevices,
    NoDevices,
    Value,
    Void,
)
from hooks.requests.naming import items_of, parse_channels, parse_names
from hooks.requests.request_errors import MalformedMigAccess
from hooks.requests.sources import (
    Origin,
    Said,
    in_annotations,
    in_environment,
    in_mounts,
    is_legacy,
    nvidia_hooks,
    variables_of,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any, Final

    from hooks.config import Config
    from hooks.requests.names import Names

__all__ = [
    "CAPABILITIES",
    "DEFAULT_CAPABILITIES",
    "IMEX",
    "AllDevices",
    "Capability",
    "DeviceName",
    "Devices",
    "Feature",
    "GpuBusId",
    "GpuIndex",
    "GpuUuid",
    "MigIndex",
    "MigInstance",
    "MigUuid",
    "NamedDevices",
    "NoDevices",
    "Origin",
    "Request",
    "Void",
    "parse_capabilities",
    "read_more",
    "read_request",
]


class Capability:
    """The words of NVIDIA_DRIVER_CAPABILITIES (an ``enum`` would cost its import)."""

    COMPUTE: Final = "compute"
    UTILITY: Final = "utility"
    GRAPHICS: Final = "graphics"
    VIDEO: Final = "video"
    DISPLAY: Final = "display"
    NGX: Final = "ngx"
    COMPAT32: Final = "compat32"


CAPABILITIES: Final = frozenset(
    {
        Capability.COMPUTE,
        Capability.UTILITY,
        Capability.GRAPHICS,
        Capability.VIDEO,
        Capability.DISPLAY,
        Capability.NGX,
        Capability.COMPAT32,
    }
)
DEFAULT_CAPABILITIES: Final = frozenset({Capability.UTILITY, Capability.COMPUTE})


IMEX: Final = "imex-channels"
"""The word for IMEX channels beside those of :class:`Feature`."""


class Request(Value):
    """What a container asks for, and who said so.

    Attributes:
        devices: of NVIDIA's devices, which.
        capabilities: the driver capabilities, a subset of :data:`CAPABILITIES`.
        features: what else of NVIDIA's, words of :class:`Feature`.
        imex_channels: numbers of IMEX channels; None for every one that the node has.
        requirements: expressions that the driver and each GPU have to meet
            ("cuda>=12.4 brand=tesla,driver>=535"), by the variable that has them.
        cdi_devices: fully qualified CDI names ("amd.com/gpu=0") whose meaning is in a CDI file.
        cdi_origin: who said these, of :class:`Origin`.
        only_variables: what of ``features`` no list of devices names, but variables alone; and
            :data:`IMEX`, if the channels are theirs. Another may have written the list.
        amd_devices: what AMD_VISIBLE_DEVICES asks; "" for nothing.
        intel_devices: what INTEL_VISIBLE_DEVICES asks; "" for nothing.
        hooked: whether NVIDIA's own hook is in the spec, and is to be taken out.
        origin: who asks for NVIDIA's, of :class:`Origin`; if nothing of it is asked, who named
            devices otherwise.
        source: where it is said, for people ("NVIDIA_VISIBLE_DEVICES=0").
    """

    __slots__ = __match_args__ = (
        "devices",
        "capabilities",
        "features",
        "imex_channels",
        "requirements",
        "cdi_devices",
        "cdi_origin",
        "only_variables",
        "amd_devices",
        "intel_devices",
        "hooked",
        "origin",
        "source",
    )
    devices: Devices
    capabilities: frozenset[str]
    features: frozenset[str]
    imex_channels: tuple[int, ...] | None
    requirements: tuple[tuple[str, str], ...]
    cdi_devices: tuple[str, ...]
    cdi_origin: str
    only_variables: frozenset[str]
    amd_devices: str
    intel_devices: str
    hooked: bool
    origin: str
    source: str

    def __init__(
        self,
        devices: Devices,
        capabilities: frozenset[str] = frozenset(),
        *,
        features: frozenset[str] = frozenset(),
        imex_channels: tuple[int, ...] | None = (),
        requirements: tuple[tuple[str, str], ...] = (),
        cdi_devices: tuple[str, ...] = (),
        cdi_origin: str = Origin.NOBODY,
        only_variables: frozenset[str] = frozenset(),
        amd_devices: str = "",
        intel_devices: str = "",
        hooked: bool = False,
        origin: str = Origin.NOBODY,
        source: str = "",
    ) -> None:
        put = object.__setattr__
        put(self, "devices", devices)
        put(self, "capabilities", capabilities)
        put(self, "features", features)
        put(self, "imex_channels", imex_channels)
        put(self, "requirements", requirements)
        put(self, "cdi_devices", cdi_devices)
        put(self, "cdi_origin", cdi_origin)
        put(self, "only_variables", only_variables)
        put(self, "amd_devices", amd_devices)
        put(self, "intel_devices", intel_devices)
        put(self, "hooked", hooked)
        put(self, "origin", origin)
        put(self, "source", source)

    @property
    def wants_driver(self) -> bool:
        """Whether anything of NVIDIA's driver is asked, so that its inventory is needed."""
        asked = not isinstance(self.devices, Void) or bool(self.features)
        return asked or self.imex_channels != ()

    @property
    def wants_injection(self) -> bool:
        """Whether the spec is to be edited; if not, the container is not touched at all."""
        others = bool(self.cdi_devices or self.amd_devices or self.intel_devices)
        return self.wants_driver or others or self.hooked


_DISABLE_REQUIRE: Final = "NVIDIA_DISABLE_REQUIRE"
_IMEX_CHANNELS: Final = "NVIDIA_IMEX_CHANNELS"
_REQUIRE: Final = "NVIDIA_REQUIRE_"
_JETPACK: Final = "NVIDIA_REQUIRE_JETPACK"  # says which files of Tegra's are wanted
_FEATURES: Final = {
    "NVIDIA_GDS": Feature.GDS,
    "NVIDIA_MOFED": Feature.MOFED,
    "NVIDIA_GDRCOPY": Feature.GDRCOPY,
    "NVIDIA_NVSWITCH": Feature.NVSWITCH,
}
_MIG_ACCESS: Final = {
    "NVIDIA_MIG_CONFIG_DEVICES": Feature.MIG_CONFIG,
    "NVIDIA_MIG_MONITOR_DEVICES": Feature.MIG_MONITOR,
}
_DRA_VENDOR: Final = "k8s.gpu.nvidia.com"  # of NVIDIA's DRA driver, whose classes are claims
# What Go's strconv.ParseBool takes for true.
_TRUE: Final = frozenset({"1", "t", "T", "true", "TRUE", "True"})


def read_request(spec: Mapping[str, Any], config: Config | None = None) -> Request:
    """What the container of an OCI spec asks for.

    Args:
        spec: config.json, decoded. It is not changed.
        config: where to look; the defaults if not given.

    Returns:
        The request; its ``devices`` are :class:`Void` if none of NVIDIA's is asked.

    Raises:
        MalformedSpec: a part of the spec has the wrong shape.
        RequestError: what is asked cannot be understood.

    Source: OCI runtime specification, config.md, "process", "Mounts", "Annotations".
    """
    if config is None:
        from hooks.config import Config  # noqa: PLC0415 - it loads dataclasses

        config = Config()
    variables = variables_of(spec)
    hooks = nvidia_hooks(spec)
    nvidia: Said | None = None
    others: Said | None = None
    for said in _said(spec, variables, hooks, config):
        if said.names.cdi_devices and others is None:
            others = said
        names = said.names
        if names.of_nvidia or not names.cdi_devices or any(map(_is_nvidia_gpu, names.cdi_devices)):
            nvidia = said
            break
    first = nvidia or others
    amd, intel = (_text(variables, name) for name in (AMD_DEVICES, INTEL_DEVICES))
    of_vendors = [f"{AMD_DEVICES}={amd}"] if amd else []
    of_vendors += [f"{INTEL_DEVICES}={intel}"] if intel else []
    usual = Origin.ENVIRONMENT if of_vendors else Origin.NOBODY
    request = Request(
        nvidia.names.devices if nvidia else Void(),
        cdi_devices=others.names.cdi_devices if others else (),
        cdi_origin=others.origin if others else Origin.NOBODY,
        amd_devices=amd,
        intel_devices=intel,
        hooked=bool(hooks),
        origin=first.origin if first else usual,
        source=" ".join([first.source, *of_vendors] if first else of_vendors),
    )
    if nvidia is None or not nvidia.names.of_nvidia:
        return request
    return _with_all_of_nvidia(request, nvidia.names, variables)


def read_more(spec: Mapping[str, Any], held: Iterable[str]) -> Request:
    """What a container asks for beside the devices that its spec has already.

    Args:
        spec: config.json, decoded. It is not changed.
        held: what those devices go by (:mod:`hooks.holding`).

    Returns:
        A request of these devices, with the driver capabilities that the container names.

    Raises:
        MalformedSpec: a part of the spec has the wrong shape.
        RequestError: what is asked cannot be understood.
    """
    named = variables_of(spec).get(_CAPABILITIES, "")
    source = f"nodes that the spec lists, {_CAPABILITIES}={named}"
    return Request(
        parse_names(held, asked=source).devices,
        parse_capabilities(named),
        origin=Origin.SPEC,
        source=source,
    )


def _is_nvidia_gpu(cdi_device: str) -> bool:
    """Whether a CDI file gives a GPU of NVIDIA's by this name, as its device plugins write them.

    Who got one so is not to get those as well that its image wants.
    """
    vendor, _, rest = cdi_device.partition("/")
    of_nvidia = vendor == "nvidia.com" or vendor.endswith(".nvidia.com")
    return of_nvidia and (rest.startswith("gpu=") or vendor == _DRA_VENDOR)


def _said(
    spec: Mapping[str, Any], variables: Mapping[str, str], hooks: set[str], config: Config
) -> Iterator[Said]:
    """What each place says that says anything, by the table in this module's head.

    A place is read only when it is its turn: a device plugin that mounts the names of devices
    puts something into the variable that names none.
    """
    annotations = in_annotations(spec, config)
    if annotations is not None:
        yield annotations
    mounts = in_mounts(spec, config)
    if mounts is not None:
        yield mounts
    environment = in_environment(variables, config, hooks)
    if environment is not None:
        yield environment


def parse_capabilities(value: str | None, *, legacy: bool = False) -> frozenset[str]:
    """A value of NVIDIA_DRIVER_CAPABILITIES, by the rules in this module's head.

    Args:
        value: the variable's value; None if it is not set.
        legacy: the image is one from before the variable existed.

    Returns:
        A subset of :data:`CAPABILITIES`, not empty.

    Raises:
        UnknownCapability: a word is not one of them.
    """
    if value is None and legacy:
        return CAPABILITIES
    items = items_of(value or "")
    if "all" in items:
        return CAPABILITIES
    for item in items:
        if item not in CAPABILITIES:
            raise UnknownCapability(
                f"{_CAPABILITIES}={value}",
                found=f'"{item}" is no driver capability',
                do=f"use all, or some of {', '.join(sorted(CAPABILITIES))}",
            )
    return frozenset(items) or DEFAULT_CAPABILITIES


def _with_all_of_nvidia(request: Request, names: Names, variables: Mapping[str, str]) -> Request:
    """A request with what is honoured if anything of NVIDIA's is asked."""
    legacy = is_legacy(variables)
    channels, by_variables = names.imex_channels, _features(variables)
    only_variables = by_variables - names.features
    if channels == ():
        value = variables.get(_IMEX_CHANNELS, "")
        channels = parse_channels(items_of(value), asked=f"{_IMEX_CHANNELS}={value}")
        only_variables |= {IMEX} if channels != () else frozenset()
    fields = {name: getattr(request, name) for name in Request.__slots__}
    fields |= {
        "capabilities": parse_capabilities(variables.get(_CAPABILITIES), legacy=legacy),
        "features": names.features | by_variables,
        "only_variables": only_variables,
        "imex_channels": channels,
        "requirements": _requirements(variables, legacy=legacy),
    }
    return Request(**fields)


def _features(variables: Mapping[str, str]) -> frozenset[str]:
    found = {word for name, word in _FEATURES.items() if variables.get(name) == "enabled"}
    for name, word in _MIG_ACCESS.items():
        value = variables.get(name, "").strip()
        if value == "all":
            found.add(word)
        elif value not in NOTHING and value != "none":
            raise MalformedMigAccess(
                f"{name}={value}", found="it is for no single device", do="use all, or nothing"
            )
    return frozenset(found)


def _requirements(variables: Mapping[str, str], *, legacy: bool) -> tuple[tuple[str, str], ...]:
    if variables.get(_DISABLE_REQUIRE, "").strip() in _TRUE:
        return ()
    found = [
        (name, value)
        for name, value in sorted(variables.items())
        if name.startswith(_REQUIRE) and not name.startswith(_JETPACK) and value.strip()
    ]
    if legacy:
        major, _, rest = variables[CUDA_VERSION].strip().partition(".")
        minor = rest.partition(".")[0]
        if (major + minor).isascii() and major.isdecimal() and minor.isdecimal():
            found.append((CUDA_VERSION, f"cuda>={major}.{minor}"))
    return tuple(found)


def _text(variables: Mapping[str, str], name: str) -> str:
    """What another vendor's variable asks; "" for nothing."""
    value = variables.get(name, "").strip()
    items = set(items_of(value))
    return "" if items <= {"none"} or "void" in items else value
