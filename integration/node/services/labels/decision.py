"""Decide which labels a node has. Pure.

Rules
- The values are those of NVIDIA's GPU feature discovery, with the same names, including deprecated
  ones.
- An unknown value is left out. Without a GPU there are no labels.
- ``migStrategy: none`` labels whole GPUs, also those in MIG mode (with no replicas). ``single``
  replaces the labels of GPUs by those of MIG devices; if GPUs are in different modes, or MIG
  devices of different profiles, or missing, the product ends with ``-MIG-INVALID`` and the count is
  0. ``mixed`` adds labels for each profile.
- The labels of GPUs describe one model: the most frequent among the GPUs without MIG mode or,
  without such GPUs, among all; of equally frequent ones the first by name. GFD chooses at random
  each time. A note names the other models.
- A value is shortened to 63 valid characters. A product keeps its end, which tells what the
  resource is. A label that is still not valid, such as that of a profile with an unusual name, is
  left out, because the API server would refuse all labels with it.
- The family is the architecture that NVML names. GFD guesses it from the compute capability, and
  would take a GPU of 10.7 (Rubin) for a Blackwell.
- A lost GPU counts, but does not decide which mode the GPUs are in.
- GPUs that the configuration excludes, and DGX Displays, do not count.

Source: NVIDIA's k8s-device-plugin, internal/lm and internal/resource; Kubernetes, "Syntax and
character set" of labels.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from hooks.node.gpus import Gpu, MigDevice
from hooks.node.inventory import Inventory
from integration.node.services.labels.host import HostFacts
from integration.node.services.labels.names import DOMAIN, GPU
from integration.node.values.resources import MPS, Mig, Settings, SharedResource
from integration.nvml.mig_parts import Parts

_LONGEST: Final = 63
_UNFIT: Final = re.compile(r"[^A-Za-z0-9_. -]")
_FIT: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_ENDS: Final = "-_."
_SHARED: Final = "-SHARED"
_INVALID: Final = "-MIG-INVALID"
_MEBI: Final = 1 << 20

_DISPLAYS: Final = frozenset({"DGX Display", "NVIDIA DGX Display"})
_MODES: Final[Mapping[str, str]] = {"0x030200": "compute", "0x030000": "graphics"}
_UNKNOWN_MODE: Final = "unknown"
_VERSION_PARTS: Final = (2, 3)
_SLICES: Final = re.compile(r"(?:(?P<ci>\d+)c\.)?(?P<gi>\d+)g\.")

# The figures of a MIG device, in the order of integration.nvml.mig_parts.CAPACITIES.
_FIGURES: Final = (
    "memory", "multiprocessors", "engines.copy", "engines.decoder", "engines.encoder",
    "engines.jpeg", "engines.ofa",
)  # fmt: skip

_Values = dict[str, str | int | None]


@dataclass(frozen=True, slots=True)
class NodeLabels:
    """The labels of a node."""

    labels: Mapping[str, str] = field(default_factory=dict)  # by their full names
    note: str = ""  # a line on what they leave out; "" for nothing


class _Share(NamedTuple):
    """How the devices of a resource are shared."""

    replicas: int = 1
    strategy: str = "none"
    suffix: str = ""  # of the product


class _Named(NamedTuple):
    """A device, as the device plugin's settings name it."""

    model: str
    names: tuple[str, ...]


def labels_of(
    inventory: Inventory,
    settings: Settings,
    mig: Parts,
    host: HostFacts,
    clique: str | None = None,
) -> NodeLabels:
    """Return the labels of a node.

    Args:
        settings: the settings of the device plugin.
        clique: the value of ``gpu.clique``; None if the GPUs are in no fabric, or in several.
    """
    gpus = [gpu for gpu in inventory.gpus if not gpu.excluded and gpu.model not in _DISPLAYS]
    if not gpus:
        return NodeLabels()
    model = _first_of(gpu.model for gpu in gpus if not gpu.mig) or _first_of(g.model for g in gpus)
    values = _driver(inventory.driver.version, inventory.cuda_version)
    values |= {
        "gpu.present": "true",
        "gpu.machine": _valid(host.machine),
        "gpu.mode": _mode(gpus, host.classes),
        "gpu.clique": clique,
        "mig.capable": _boolean(any(gpu.profiles for gpu in mig.gpus.values())),
        "mps.capable": _boolean(_is_mps(settings)),
        "vgpu.present": None if host.vgpu is None else _boolean(host.vgpu),
    }
    values |= _whole(gpus, model, settings)
    if settings.mig_strategy is not Mig.NONE:
        values |= {"mig.strategy": settings.mig_strategy.value}
        devices = _Devices(gpus, inventory.mig_devices, mig, settings)
        is_single = settings.mig_strategy is Mig.SINGLE
        values |= devices.single(model) if is_single else devices.mixed()
    known = {name: str(value) for name, value in values.items() if value is not None}
    labels = {f"{DOMAIN}{name}": value for name, value in known.items() if _is_label(name, value)}
    return NodeLabels(labels, _note(gpus, model))


# -- the node ----------------------------------------------------------------------------------


def _driver(version: str, cuda: str) -> _Values:
    """Return the versions of the driver and of the newest CUDA that it supports."""
    values: _Values = {}
    parts = version.split(".")
    if len(parts) in _VERSION_PARTS:
        major, minor, revision = (*parts, "")[:3]
        values |= {
            "cuda.driver-version.full": version,
            "cuda.driver-version.major": major,
            "cuda.driver-version.minor": minor,
            "cuda.driver-version.revision": revision,
            "cuda.driver.major": major,
            "cuda.driver.minor": minor,
            "cuda.driver.rev": revision,
        }
    major, dot, minor = cuda.partition(".")
    if dot:
        values |= {
            "cuda.runtime-version.full": cuda,
            "cuda.runtime-version.major": major,
            "cuda.runtime-version.minor": minor,
            "cuda.runtime.major": major,
            "cuda.runtime.minor": minor,
        }
    return values


def _mode(gpus: Iterable[Gpu], classes: Mapping[str, str]) -> str | None:
    """Return the GPUs' mode by their PCI classes; None if sysfs lacks the class of a GPU."""
    found = {classes.get(gpu.bus_id) for gpu in gpus}
    if None in found:
        return None
    modes = {_MODES.get(kind or "", _UNKNOWN_MODE) for kind in found}
    return modes.pop() if len(modes) == 1 else _UNKNOWN_MODE


def _is_mps(settings: Settings) -> bool:
    sharing = settings.sharing
    return sharing.kind == MPS and any(each.replicas > 1 for each in sharing.resources)


def _note(gpus: Iterable[Gpu], model: str) -> str:
    """Return which GPUs the labels do not describe; "" if they describe all."""
    models = Counter(gpu.model for gpu in gpus)
    others = ", ".join(f"{name} ({models[name]})" for name in sorted(models) if name != model)
    if not others:
        return ""
    return (
        f"{DOMAIN}{GPU}.* describes {models[model]} of {models.total()} GPUs, {model}; "
        f"the node also has: {others}"
    )


# -- GPUs and MIG devices ----------------------------------------------------------------------


def _whole(gpus: list[Gpu], model: str, settings: Settings) -> _Values:
    """Return the labels of the GPUs of one model."""
    there = [_Named(gpu.model, (gpu.uuid, str(gpu.index))) for gpu in gpus if not gpu.mig]
    gpus = [gpu for gpu in gpus if gpu.model == model]
    # Without a GPU outside MIG mode, the resource has no device.
    share = _Share(0)
    if not all(gpu.mig for gpu in gpus):
        share = _share(settings, GPU, there, model)
    memory = next((gpu.memory for gpu in gpus if gpu.memory), None)
    capability = next((gpu.compute_capability for gpu in gpus if gpu.compute_capability), "")
    values = _devices(model, len(gpus), share)
    if memory is not None:
        values["memory"] = memory // _MEBI
    labels: _Values = {f"{GPU}.{name}": value for name, value in values.items()}
    architecture = next((gpu.architecture for gpu in gpus if gpu.architecture), "")
    labels["gpu.family"] = architecture.lower().replace(" ", "-") or None
    major, _, minor = capability.partition(".")
    if major.isdecimal() and minor.isdecimal():
        labels |= {
            "gpu.compute.major": major,
            "gpu.compute.minor": minor,
        }
    return labels


class _Devices:
    """The MIG devices of a node.

    Args:
        gpus: the GPUs that count.
        there: all MIG devices.
    """

    def __init__(
        self, gpus: list[Gpu], there: Iterable[MigDevice], mig: Parts, settings: Settings
    ) -> None:
        self._gpus = {gpu.index: gpu for gpu in gpus}
        self._there = [each for each in there if each.gpu in self._gpus]
        self._mig = mig
        self._settings = settings

    def single(self, model: str) -> _Values:
        """Return the labels that replace those of GPUs; none if no GPU is in MIG mode.

        Args:
            model: the model whose GPUs are labelled.
        """
        answering = [gpu for gpu in self._gpus.values() if not gpu.lost]
        in_mode = [gpu for gpu in answering if gpu.mig]
        if not in_mode:
            return {}
        profiles = {each.profile for each in self._there}
        cut = {each.gpu for each in self._there}
        are_alike = len(profiles) == 1 and "" not in profiles
        if are_alike and in_mode == answering and all(gpu.index in cut for gpu in in_mode):
            of_model = [each for each in self._there if self._gpus[each.gpu].model == model]
            return self._labels(GPU, of_model or self._there)
        values = _devices(model, 0, _Share(0, "", _INVALID)) | {"memory": 0}
        return {f"{GPU}.{name}": value for name, value in values.items()}

    def mixed(self) -> _Values:
        """Return the labels of each profile."""
        values: _Values = {}
        for profile in sorted({each.profile for each in self._there} - {""}):
            devices = [each for each in self._there if each.profile == profile]
            values |= self._labels(f"mig-{_plain(profile)}", devices)
        return values

    def _labels(self, prefix: str, devices: list[MigDevice]) -> _Values:
        """Return the labels of the devices of one profile; they describe those on one model."""
        model = _first_of(self._gpus[each.gpu].model for each in devices)
        devices = [each for each in devices if self._gpus[each.gpu].model == model]
        profile, figures = devices[0].profile, self._mig.figures
        there = [self._named(each) for each in self._there if each.profile == profile]
        share = _share(self._settings, prefix, there, model)
        share = share._replace(suffix=f"-MIG-{_plain(profile)}{share.suffix}")
        values = _devices(model, len(devices), share)
        known = next((figures[each.uuid] for each in devices if each.uuid in figures), ())
        values |= dict(zip(_FIGURES, known, strict=False))
        if slices := _SLICES.match(profile):
            values |= {"slices.gi": slices["gi"], "slices.ci": slices["ci"] or slices["gi"]}
        return {f"{prefix}.{name}": value for name, value in values.items()}

    def _named(self, device: MigDevice) -> _Named:
        gpu = self._gpus[device.gpu]
        # The last name is that of drivers before 470.
        legacy = f"MIG-{gpu.uuid}/{device.gpu_instance}/{device.compute_instance}"
        return _Named(gpu.model, (device.uuid, f"{device.gpu}:{device.index}", legacy))


def _devices(model: str, count: int, share: _Share) -> _Values:
    """Return what GPUs and MIG devices have in common."""
    return {
        "product": _valid(model, share.suffix),
        "count": count,
        "replicas": share.replicas,
        "sharing-strategy": share.strategy,
    }


def _share(settings: Settings, resource: str, there: list[_Named], model: str) -> _Share:
    """Return how the devices of one model in a resource are shared.

    Args:
        there: all devices of the resource, in the order of indices.
    """
    sharing, rest, found = settings.sharing, there, None
    for each in sharing.resources:
        if each.name == f"{DOMAIN}{resource}" and each.replicas > 1:
            chosen = _chosen(each, there)
            rest = [device for device in rest if device not in chosen]
            if found is None and any(device.model == model for device in chosen):
                found = each
    if found is None:
        return _Share()
    # If only some devices are shared, they form a resource of their own, as if renamed.
    is_renamed = bool(found.rename or rest) or sharing.rename_by_default
    return _Share(found.replicas, sharing.kind, "" if is_renamed else _SHARED)


def _chosen(share: SharedResource, there: list[_Named]) -> list[_Named]:
    """Return the devices that are shared, as the device plugin chooses them."""
    if share.devices is None:
        return there[: share.count]
    return [each for each in there if share.lists(each.names, each.model)]


def _first_of(models: Iterable[str]) -> str:
    """Return the most frequent one, of equally frequent ones the first by name; "" for none."""
    counts = Counter(models)
    return min(counts, key=lambda name: (-counts[name], name), default="")


# -- values ------------------------------------------------------------------------------------


def _boolean(value: bool) -> str:  # noqa: FBT001 - it is what is written
    return str(value).lower()


def _is_label(name: str, value: str) -> bool:
    return bool(_FIT.fullmatch(name)) and (not value or bool(_FIT.fullmatch(value)))


def _plain(profile: str) -> str:
    """Return a profile as in a resource's name: "1g.10gb+me" is "1g.10gb.me"."""
    return profile.replace("+", ".").replace(",", ".")


def _valid(text: str, suffix: str = "") -> str | None:
    """Return a text as the value of a label; None if none of its characters are valid.

    Args:
        suffix: what the value ends with, however long the text is.
    """
    words = "-".join(_UNFIT.sub("", text).split()).strip(_ENDS)
    value = words[: _LONGEST - len(suffix)].rstrip(_ENDS)
    return f"{value}{suffix}" if value else None
