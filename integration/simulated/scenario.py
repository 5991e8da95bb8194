"""Describe a simulated node: how many GPUs, which model, which MIG devices.

A scenario is a small TOML file. Everything has a default; these are all keys::

    gpus = 2                      # how many, 0 to 32
    model = "h100"                # a key of integration.simulated.catalogue.MODELS
    driver = "535.104.05"         # the driver's version; by default that of the packages, or the
                                  # first that supports the models
    cuda = "12.2"                 # the CUDA version the driver offers; by default its branch's
    drm = true                    # /dev/dri/cardN and renderDN for each GPU
    imex-channels = [0]           # /dev/nvidia-caps-imex-channels/channelN
    compat32 = true               # also libraries for 32-bit programs
    beside = ["gds", "mofed"]     # companion drivers, see integration.simulated.companion_drivers
    nvidia = true                 # false for a node without NVIDIA's driver, and gpus = 0
    platform = "tegra"            # or "wsl": not NVIDIA's usual driver, and gpus = 0
    amd = ["mi300x/8"]            # GPUs of AMD, see integration.simulated.vendors
    intel = ["flex170"]           # GPUs of Intel
    nvml-lacks = ["nvmlEventSetWait_v2"]   # functions that this NVML does not have

    [[gpu]]                       # settings of one GPU
    index = 0                     # NVML's, which need not be the order of PCI addresses
    model = "a100"
    uuid = "GPU-8ef4a8d0-0000-4000-8000-000000000000"
    pci = "0000:3b:00.0"
    minor = 3                     # of its device node; by default its index
    mig = ["3g.20gb", "2g.10gb", "3g.20gb/1c+2c"]   # MIG mode on; [] for no instances yet

A MIG entry is one GPU instance. After the slash come its compute instances, unless it is a single
one that fills it. Instances get the places and numbers that the driver would give them. The node's
own ``nvidia-smi mig`` can create and destroy more.

UUIDs and serial numbers are derived from the GPU's model and index, so the same scenario always
gives the same node.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hooks.named_files import read_named
from hooks.node.roots import cuda_of_branch
from integration.simulated.catalogue import MODELS, Model
from integration.simulated.companion_drivers import COMPANION_DRIVERS
from integration.simulated.errors import ScenarioInvalid, invalid
from integration.simulated.mig import GpuInstance, layout, made_uuid, mig_entry
from integration.simulated.vendors import AMD_MODELS, INTEL_MODELS, VendorGpu, parse_vendors

SHIPPED: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "scenarios")

TEGRA: Final = "tegra"
WSL: Final = "wsl"
PLATFORMS: Final = (TEGRA, WSL)
"""Nodes without NVIDIA's usual driver; see integration.simulated.platforms."""

# The kernel module has capability minors for 32 GPUs.
MOST_GPUS: Final = 32

# The buses of the eight GPUs of an HGX board; further GPUs get the buses after them.
_BUSES: Final = (0x18, 0x2A, 0x3A, 0x5D, 0x9A, 0xAB, 0xBA, 0xDB)

_PCI: Final = re.compile(r"([0-9a-f]{4}):([0-9a-f]{2}):([01][0-9a-f])\.0", re.ASCII)
_DRIVER: Final = re.compile(r"\d{3}\.\d{1,3}(\.\d{2})?", re.ASCII)
_OLDEST_CUDA: Final = (9, 0)
_CUDA: Final = re.compile(r"(\d{1,2})\.(\d)", re.ASCII)
_UUID: Final = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
_FUNCTION: Final = re.compile(r"nvml[A-Z][A-Za-z0-9]*(_v\d)?", re.ASCII)

_TOP_KEYS: Final = frozenset({
    "gpus", "model", "driver", "cuda", "drm", "imex-channels", "beside", "compat32", "gpu",
    "nvidia", "platform", "amd", "intel", "nvml-lacks",
})  # fmt: skip
_GPU_KEYS: Final = frozenset({"index", "model", "uuid", "pci", "minor", "mig"})


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of a node."""

    index: int  # NVML's index if all GPUs are visible
    key: str  # its model's key in the catalogue
    uuid: str  # "GPU-…"
    pci: str  # "0000:18:00.0", as in sysfs
    minor: int  # the minor of its device node
    numa_node: int
    mig: tuple[GpuInstance, ...] | None = None  # its GPU instances; None if MIG mode is off

    @property
    def model(self) -> Model:
        """Its model."""
        return MODELS[self.key]

    @property
    def vbios(self) -> str:
        """The version of its video BIOS."""
        return f"{self.model.vbios}.{self.index:02X}.00.01"

    @property
    def serial(self) -> str:
        """Its serial number, thirteen digits."""
        return str(int.from_bytes(hashlib.sha256(self.uuid.encode()).digest()[:5]) + 10**12)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A simulated node's hardware and driver."""

    gpus: tuple[Gpu, ...]  # in the order of NVML's indices
    driver: str = ""  # the driver's version; empty for the default, see driver_version
    # the CUDA version of the driver; None for that of its branch
    cuda: tuple[int, int] | None = None
    drm: bool = True  # whether the GPUs have DRM nodes
    imex_channels: tuple[int, ...] = ()
    nvidia: bool = True  # whether the node has NVIDIA's usual driver
    platform: str = ""  # another driver of NVIDIA's, one of PLATFORMS; "" for none
    others: tuple[VendorGpu, ...] = ()  # the GPUs of other vendors
    # other drivers, keys of integration.simulated.companion_drivers
    companion_drivers: tuple[str, ...] = ()
    compat32: bool = False  # whether the driver has libraries for 32-bit programs
    # functions that its NVML does not have, like an older driver's
    nvml_lacks: tuple[str, ...] = ()

    @classmethod
    def of(cls, gpus: int = 1, model: str = "h100", **more: object) -> Scenario:
        """Return a scenario from arguments.

        Args:
            model: a key of the catalogue.
            more: the other keys of a scenario file, ``_`` for ``-``.

        Raises:
            ScenarioInvalid: the scenario is not valid.
        """
        renamed = {name.replace("_", "-"): value for name, value in more.items()}
        return cls.parse({"gpus": gpus, "model": model, **renamed})

    @classmethod
    def load(cls, name: str) -> Scenario:
        """Return a scenario from a file, or a shipped one by its name.

        Args:
            name: a path, or "one", "two", "eight", "sixteen", "mig", "full".

        Raises:
            ScenarioInvalid: there is no such file, or it is not valid.
        """
        shipped = os.path.join(SHIPPED, f"{name}.toml")
        path = shipped if os.sep not in name and os.path.exists(shipped) else name
        try:
            return cls.parse(tomllib.loads(read_named(path).decode()))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
            names = sorted(f.removesuffix(".toml") for f in os.listdir(SHIPPED) if ".toml" in f)
            raise ScenarioInvalid(
                f"to read the scenario {name}",
                found=getattr(error, "strerror", None) or str(error),
                do=f"name a TOML file, or one of {', '.join(names)}",
            ) from error

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> Scenario:
        """Return a scenario from the parsed table of its file.

        Raises:
            ScenarioInvalid: a key is unknown, a value has the wrong type, a model has no MIG, a
                layout does not fit, two GPUs share an address or a minor, or the driver is too old
                for a model.
        """
        _known(table, _TOP_KEYS, "a scenario")
        platform = _typed(table, "platform", str, "")
        if platform and platform not in PLATFORMS:
            raise invalid(f'platform = "{platform}"', "unknown", f"use {', '.join(PLATFORMS)}")
        nvidia = _typed(table, "nvidia", bool, not platform)
        if nvidia and platform:
            raise invalid(f'platform = "{platform}"', "nvidia = true", "leave one of them out")
        count = _typed(table, "gpus", int, 1 if nvidia else 0)
        if not 0 <= count <= MOST_GPUS:
            raise invalid(f"gpus = {count}", "the driver supports 0 to 32", "choose fewer")
        if count and not nvidia:
            raise invalid(f"gpus = {count}", "nvidia = false", "leave one of them out")
        overrides = _overrides(table, count)
        model = _typed(table, "model", str, "h100")
        gpus = [_gpu(index, count, model, overrides.get(index, {})) for index in range(count)]
        amd, intel = _typed(table, "amd", list, []), _typed(table, "intel", list, [])
        others = parse_vendors(amd, intel, count)
        _check_unique(gpus, others)
        return cls(
            gpus=tuple(gpus),
            driver=_driver(table, gpus),
            cuda=_cuda(_matched(table, "cuda", _CUDA, "a version such as 12.2")),
            drm=_typed(table, "drm", bool, True),
            imex_channels=_channels(_typed(table, "imex-channels", list, [])),
            nvidia=nvidia,
            platform=platform,
            others=others,
            compat32=_typed(table, "compat32", bool, False),
            companion_drivers=_companion_drivers(_typed(table, "beside", list, []), nvidia=nvidia),
            nvml_lacks=_functions(_typed(table, "nvml-lacks", list, [])),
        )

    def driver_version(self, packages: str) -> str:
        """Return the full version of this node's driver.

        Args:
            packages: the version of the packages. It is used unless the scenario names another, or
                a model needs a newer one.
        """
        return self.driver or max((packages, *(g.model.driver for g in self.gpus)), key=_numbers)

    def cuda_version(self, driver: str) -> tuple[int, int]:
        """Return the CUDA version of a driver on this node.

        Returns:
            (major, minor).
        """
        return self.cuda or _cuda(cuda_of_branch(driver)) or _OLDEST_CUDA

    def to_toml(self) -> str:
        """Return the scenario as TOML with all defaults written out; parsing it restores it."""
        table = {
            "gpus": len(self.gpus),
            "driver": self.driver or None,
            "cuda": self.cuda and ".".join(map(str, self.cuda)),
            "drm": self.drm,
            "imex-channels": self.imex_channels,
            "compat32": self.compat32,
            "beside": self.companion_drivers,
            "nvidia": self.nvidia,
            "platform": self.platform or None,
            "nvml-lacks": self.nvml_lacks or None,
            "amd": [other.entry for other in self.others if other.key in AMD_MODELS],
            "intel": [other.entry for other in self.others if other.key in INTEL_MODELS],
        }
        lines = _assignments(table)
        for gpu in self.gpus:
            mig = None if gpu.mig is None else [mig_entry(instance) for instance in gpu.mig]
            lines += ["", "[[gpu]]"]
            lines += _assignments(
                {
                    "index": gpu.index,
                    "model": gpu.key,
                    "uuid": gpu.uuid,
                    "pci": gpu.pci,
                    "minor": gpu.minor,
                    "mig": mig,
                }
            )
        return "\n".join(lines) + "\n"


def _assignments(table: Mapping[str, object]) -> list[str]:
    """Return lines of TOML, which writes these values like JSON; None is left out."""
    return [f"{key} = {json.dumps(value)}" for key, value in table.items() if value is not None]


def _overrides(table: Mapping[str, Any], count: int) -> dict[int, Mapping[str, Any]]:
    """Return the settings of single GPUs, by index."""
    overrides: dict[int, Mapping[str, Any]] = {}
    for entry in _typed(table, "gpu", list, []):
        _known(entry, _GPU_KEYS, "a [[gpu]]")
        index = _typed(entry, "index", int, -1)
        if not 0 <= index < count or index in overrides:
            raise invalid(
                f"[[gpu]] with index = {index}",
                f"{'that index is used twice' if index in overrides else f'gpus = {count}'}",
                "give each [[gpu]] an index of its own, counted from 0",
            )
        overrides[index] = entry
    return overrides


def _check_unique(gpus: Sequence[Gpu], others: Sequence[VendorGpu]) -> None:
    """Check that no two GPUs share an address, a minor or a UUID."""
    all_addresses = [*(gpu.pci for gpu in gpus), *(gpu.pci for gpu in others)]
    if len(set(all_addresses)) < len(all_addresses):
        raise invalid(
            f"PCI addresses {', '.join(all_addresses)}",
            "two are equal",
            "give each GPU an address of its own",
        )
    minors = [gpu.minor for gpu in gpus]
    if len(set(minors)) < len(gpus) or any(not 0 <= n < MOST_GPUS for n in minors):
        raise invalid(
            f"minors {', '.join(map(str, minors))}",
            f"two are equal, or one is not 0 to {MOST_GPUS - 1}",
            "give each GPU a minor of its own",
        )
    if len({gpu.uuid for gpu in gpus}) != len(gpus):
        raise invalid("UUIDs of the GPUs", "two are equal", "give each GPU its own")


def _gpu(index: int, count: int, model: str, override: Mapping[str, Any]) -> Gpu:
    key = _typed(override, "model", str, model)
    if key not in MODELS:
        raise invalid(f'model = "{key}"', "no such model", f"choose one of {', '.join(MODELS)}")
    bus = _BUSES[index] if index < len(_BUSES) else 0xDB + index - len(_BUSES) + 1
    places = MODELS[key].addresses
    name = _matched(override, "uuid", _UUID, "a UUID such as GPU-8ef4a8d0-…, lower case")
    name = name or f"GPU-{made_uuid(key, index)}"
    mig = None
    if "mig" in override:
        mig = layout(MODELS[key], name, _typed(override, "mig", list, []))
    return Gpu(
        index=index,
        key=key,
        uuid=name,
        pci=_matched(override, "pci", _PCI, "an address such as 0000:3b:00.0, lower case")
        or (places[index] if index < len(places) else f"0000:{bus:02x}:00.0"),
        minor=_typed(override, "minor", int, index),
        numa_node=index * 2 // count,
        mig=mig,
    )


def _driver(table: Mapping[str, Any], gpus: Sequence[Gpu]) -> str:
    driver = _matched(table, "driver", _DRIVER, "a version such as 535.104.05")
    least = max((gpu.model.driver for gpu in gpus), key=_numbers, default="")
    if driver and _numbers(driver) < _numbers(least):
        raise invalid(
            f'driver = "{driver}"',
            "one of the models needs a newer driver",
            f"leave it out, or write at least {least}",
        )
    return driver


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part)


def _cuda(text: str) -> tuple[int, int] | None:
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if text else None


def _channels(values: Sequence[object]) -> tuple[int, ...]:
    most = 2**20 - 1  # a device number has 20 bits for the minor
    if any(type(n) is not int or not 0 <= n <= most for n in values) or len(set(values)) < len(
        values
    ):
        raise invalid(f"imex-channels = {list(values)}", "not channel numbers", "write [0, 1]")
    return tuple(n for n in values if isinstance(n, int))


def _companion_drivers(keys: Sequence[object], *, nvidia: bool) -> tuple[str, ...]:
    if keys and not nvidia:
        raise invalid(f"beside = {list(keys)}", "nvidia = false", "leave one of them out")
    if any(key not in COMPANION_DRIVERS for key in keys) or len(set(keys)) < len(keys):
        known = ", ".join(COMPANION_DRIVERS)
        raise invalid(f"beside = {list(keys)}", "no such key", f"write some of {known}")
    return tuple(str(key) for key in keys)


def _functions(names: Sequence[object]) -> tuple[str, ...]:
    for name in names:
        if not isinstance(name, str) or _FUNCTION.fullmatch(name) is None:
            raise invalid(
                f"nvml-lacks = {list(names)}",
                f"{name!r} is not a function's name",
                'write ["nvmlEventSetWait_v2"]',
            )
    return tuple(map(str, names))


def _known(table: object, keys: frozenset[str], what: str) -> None:
    if not isinstance(table, dict):
        raise invalid(str(table), f"{what} is not a table", "see integration.simulated.scenario")
    if unknown := sorted(set(table) - keys):
        raise invalid(
            f"{what} with {', '.join(unknown)}",
            "no such key",
            f"keys are {', '.join(sorted(keys))}",
        )


def _typed(table: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    value = table.get(key, default)
    if type(value) is not kind:
        raise invalid(f"{key} = {value!r}", "wrong type", f"write {kind.__name__}")
    return value


def _matched(table: Mapping[str, Any], key: str, pattern: re.Pattern[str], form: str) -> str:
    value: str = _typed(table, key, str, "")
    if value and pattern.fullmatch(value) is None:
        raise invalid(f'{key} = "{value}"', "wrong format", f"write {form}")
    return value
