"""Read a container's request, and the place of the request, from its spec.

The first place that names an NVIDIA device decides which NVIDIA devices the container gets.
Likewise, the first place with CDI names decides about other vendors' devices. An NVIDIA GPU from a
CDI file (``k8s.device-plugin.nvidia.com/gpu=…``) also decides. Places:
:mod:`hooks.requests.places`. Names: :mod:`hooks.requests.naming`.

NVIDIA's hooks (:mod:`hooks.requests.oci_hooks`) are removed from the spec, even if nothing is
requested (:func:`hooks.edits.mutation.apply`). The hook of containerd's clients also names driver
capabilities and requirements; then only these count.

These variables count if any NVIDIA device is requested:

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
NVIDIA_IMEX_CHANNELS                numbers, or ``all``, unless a mount or CDI name has any
==================================  =====================================================

AMD_VISIBLE_DEVICES and INTEL_VISIBLE_DEVICES are kept unparsed, and always have the origin
environment.

If a variable is set twice, its last value counts, as for the process. Parsing is total: every spec
results in a request or one typed error.

containerd and Docker can apply CDI specs themselves; the last NVIDIA_VISIBLE_DEVICES is then
``void``. Without an annotation nothing else is requested, so nothing is left to do. With one, the
same devices are granted, and :func:`hooks.edits.mutation.apply` adds only what is missing.

Source: NVIDIA Container Toolkit, internal/config/image and cmd/nvidia-container-runtime-hook; its
    user guide, "Environment variables". Where they differ from each other and from this module, and
    why: docs/architecture.md, "Requests".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from api.values import dataclass, replace
from hooks.config import Config
from hooks.errors import MalformedMigAccess, UnknownCapability
from hooks.ocispec import variables_of
from hooks.requests.naming import parse_channels, parse_names, united_channels
from hooks.requests.oci_hooks import ClientRequest
from hooks.requests.places import (
    AMD_DEVICES,
    CUDA_VERSION,
    INTEL_DEVICES,
    VOID,
    DeviceText,
    SpecView,
    device_texts,
    is_legacy,
    vendor_text,
)
from hooks.requests.places import CAPABILITIES as CAPABILITIES_VARIABLE
from hooks.schema import TRUE
from hooks.words import (
    CAPABILITIES,
    DEFAULT_CAPABILITIES,
    IMEX,
    Devices,
    Feature,
    Names,
    Origin,
    Void,
    items_of,
    quotes_in,
)


@dataclass(frozen=True, slots=True)
class Request:
    """What a container requests, and where the request was written."""

    devices: Devices
    capabilities: frozenset[str] = frozenset()  # the driver capabilities, a subset of CAPABILITIES
    features: frozenset[str] = frozenset()  # other NVIDIA features, words of Feature
    # IMEX channel numbers; None for every channel of the node
    imex_channels: tuple[int, ...] | None = ()
    # expressions that the driver and each GPU have to meet ("cuda>=12.4 brand=tesla,driver>=535"),
    # by the variable that contains them
    requirements: tuple[tuple[str, str], ...] = ()
    # fully qualified CDI names ("amd.com/gpu=0") that CDI files define
    cdi_devices: tuple[str, ...] = ()
    cdi_origin: str = Origin.NOBODY  # their place, of Origin
    # the ``features`` that only variables request; also IMEX, if the channels come from a variable.
    # The device list may have another author.
    only_variables: frozenset[str] = frozenset()
    amd_devices: str = ""  # what AMD_VISIBLE_DEVICES requests; "" for nothing
    intel_devices: str = ""  # what INTEL_VISIBLE_DEVICES requests; "" for nothing
    hooked: bool = False  # whether the spec has an NVIDIA hook, which is then removed
    # the place of the request for NVIDIA's devices, of Origin; without one, for other devices
    origin: str = Origin.NOBODY
    source: str = ""  # the text of the request, for display ("NVIDIA_VISIBLE_DEVICES=0")

    @property
    def wants_driver(self) -> bool:
        """Whether it requests any part of NVIDIA's driver, and so needs its inventory."""
        asked = not isinstance(self.devices, Void) or bool(self.features)
        return asked or self.imex_channels != ()

    @property
    def wants_injection(self) -> bool:
        """Whether the engine edits the spec; if not, it leaves the container unchanged."""
        return self.wants_devices or self.hooked

    @property
    def wants_devices(self) -> bool:
        """Whether it requests any device, or any part of a driver."""
        others = bool(self.cdi_devices or self.amd_devices or self.intel_devices)
        return self.wants_driver or others

    def without_nvidia(self) -> Request:
        """Return the request without the NVIDIA devices and features of an inventory."""
        return replace(
            self,
            devices=Void(),
            capabilities=frozenset(),
            features=frozenset(),
            imex_channels=(),
            requirements=(),
            only_variables=frozenset(),
        )


_DISABLE_REQUIRE: Final = "NVIDIA_DISABLE_REQUIRE"
_IMEX_CHANNELS: Final = "NVIDIA_IMEX_CHANNELS"
_REQUIRE: Final = "NVIDIA_REQUIRE_"
_JETPACK: Final = "NVIDIA_REQUIRE_JETPACK"  # selects Tegra's files
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
# Vendors of NVIDIA's DRA driver and of ours, whose classes are claims.
_DRA_VENDORS: Final = frozenset({"k8s.gpu.nvidia.com", "k8s.gpu.containerd-shim-nvidia"})


def read_request(spec: Mapping[str, Any], config: Config | None = None) -> Request:
    """Return what the container with this OCI spec requests.

    Args:
        spec: config.json, decoded. It is not changed.
        config: defines the places to look at; the defaults if not given.

    Returns:
        The request; its ``devices`` are :class:`Void` if no NVIDIA device is requested.

    Raises:
        MalformedSpec: a part of the spec has the wrong shape.
        RequestError: the request cannot be understood.

    Source: OCI runtime specification, config.md, "process", "Mounts", "Annotations".
    """
    config = config or Config()
    view = SpecView.of(spec)
    variables, hooks = view.variables, view.hooks
    nvidia: tuple[DeviceText, Names] | None = None
    others: tuple[DeviceText, Names] | None = None
    for text in device_texts(view, config):
        names = _names_in(text)
        if names.cdi_devices and others is None:
            others = text, names
        if names.of_nvidia or not names.cdi_devices or any(map(_is_nvidia_gpu, names.cdi_devices)):
            nvidia = text, names
            break
    first = nvidia or others
    amd, intel = (vendor_text(variables, name) for name in (AMD_DEVICES, INTEL_DEVICES))
    of_vendors = [f"{AMD_DEVICES}={amd}"] if amd else []
    of_vendors += [f"{INTEL_DEVICES}={intel}"] if intel else []
    usual = Origin.ENVIRONMENT if of_vendors else Origin.NOBODY
    request = Request(
        nvidia[1].devices if nvidia else Void(),
        cdi_devices=others[1].cdi_devices if others else (),
        cdi_origin=others[0].origin if others else Origin.NOBODY,
        amd_devices=amd,
        intel_devices=intel,
        hooked=hooks.present,
        origin=first[0].origin if first else usual,
        source=" ".join([first[0].source, *of_vendors] if first else of_vendors),
    )
    if nvidia is None or not nvidia[1].of_nvidia:
        return request
    if nvidia[0].origin == Origin.SPEC and hooks.client is not None:
        variables = _without_words(variables, hooks.client)
    return _with_all_of_nvidia(request, nvidia[1], variables)


def _without_words(variables: Mapping[str, str], client: ClientRequest) -> dict[str, str]:
    """Return the variables, with a containerd client's in place of the image's."""
    of_image = (_REQUIRE, _DISABLE_REQUIRE, CUDA_VERSION, CAPABILITIES_VARIABLE)
    rest = {name: value for name, value in variables.items() if not name.startswith(of_image)}
    required = {f"{_REQUIRE}{n}": value for n, value in enumerate(client.requirements)}
    return rest | required | {CAPABILITIES_VARIABLE: ",".join(client.capabilities)}


def read_more(spec: Mapping[str, Any], held: Iterable[str]) -> Request:
    """Return a container's request beyond the devices that its spec already has.

    Args:
        spec: config.json, decoded. It is not changed.
        held: the ids of those devices (:mod:`hooks.sharing`).

    Returns:
        A request for these devices, with the driver capabilities that the container names.

    Raises:
        MalformedSpec: a part of the spec has the wrong shape.
        RequestError: the request cannot be understood.
    """
    named = variables_of(spec).get(CAPABILITIES_VARIABLE, "")
    source = f"nodes that the spec lists, {CAPABILITIES_VARIABLE}={named}"
    return Request(
        parse_names(held, asked=source).devices,
        parse_capabilities(named),
        origin=Origin.SPEC,
        source=source,
    )


def _is_nvidia_gpu(cdi_device: str) -> bool:
    """Whether this name, in the style of NVIDIA's device plugins, is an NVIDIA GPU of a CDI file.

    A container with such a GPU does not also get those that its image requests.
    """
    vendor, _, rest = cdi_device.partition("/")
    of_nvidia = vendor == "nvidia.com" or vendor.endswith(".nvidia.com")
    return vendor in _DRA_VENDORS or (of_nvidia and rest.startswith("gpu="))


def _names_in(text: DeviceText) -> Names:
    """Parse the names in one place.

    Raises:
        RequestError: a name is malformed.
    """
    names = parse_names(text.items, asked=text.source, default_kind=text.kind)
    if not text.channels:
        return names
    channels = parse_channels(text.channels, asked=text.source)
    return replace(names, imex_channels=united_channels(names.imex_channels, channels))


def parse_capabilities(value: str | None, *, legacy: bool = False) -> frozenset[str]:
    """Return the :data:`CAPABILITIES` in a value of NVIDIA_DRIVER_CAPABILITIES; at least one.

    Args:
        value: the variable's value; None if it is not set.

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
                f"{CAPABILITIES_VARIABLE}={value}",
                found=f'"{item}" is no driver capability{quotes_in(item)}',
                do=f"use all, or some of {', '.join(sorted(CAPABILITIES))}",
            )
    return frozenset(items) or DEFAULT_CAPABILITIES


def _with_all_of_nvidia(request: Request, names: Names, variables: Mapping[str, str]) -> Request:
    """Return the request with the variables that count for any NVIDIA request."""
    legacy = is_legacy(variables)
    channels, by_variables = names.imex_channels, _features(variables)
    only_variables = by_variables - names.features
    if channels == ():
        value = variables.get(_IMEX_CHANNELS, "")
        channels = parse_channels(items_of(value), asked=f"{_IMEX_CHANNELS}={value}")
        only_variables |= {IMEX} if channels != () else frozenset()
    return replace(
        request,
        capabilities=parse_capabilities(variables.get(CAPABILITIES_VARIABLE), legacy=legacy),
        features=names.features | by_variables,
        only_variables=only_variables,
        imex_channels=channels,
        requirements=_requirements(variables, legacy=legacy),
    )


def _features(variables: Mapping[str, str]) -> frozenset[str]:
    found = {word for name, word in _FEATURES.items() if variables.get(name) == "enabled"}
    for name, word in _MIG_ACCESS.items():
        value = variables.get(name, "").strip()
        if value == "all":
            found.add(word)
        elif value not in {"", VOID, "none"}:
            raise MalformedMigAccess(
                f"{name}={value}",
                found=f"it is for no single device{quotes_in(value)}",
                do="use all, or nothing",
            )
    return frozenset(found)


def _requirements(variables: Mapping[str, str], *, legacy: bool) -> tuple[tuple[str, str], ...]:
    if variables.get(_DISABLE_REQUIRE, "").strip() in TRUE:
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
