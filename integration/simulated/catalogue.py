"""The GPU models of simulated nodes, as data.

The figures are what NVML and the PCI bus report on real boards. MIG profiles are those of
``nvidia-smi mig -lgip``: a GPU's memory has eight slices and its engines seven, and a profile can
start only at the slices in ``starts``.

Not everything about the newest models is published. Names, memory, power, PCI device ids, the
names, numbers and placements of MIG profiles, and B200's engines are as reported. We assume:

- Blackwell: each profile's memory (eighths, rounded down to 128 MiB) and multiprocessors (those of
  NVIDIA's own simulator; all of them for 7g); GB200 and GB300 have B200's engines.
- GB300: subsystem id and highest clocks are GB200's.
- Minimum driver: the first release of the branch that introduced the model.

Source: NVIDIA's MIG user guide (profiles and placements), the pci.ids database, mig-parted's
configuration for the GPU operator (profiles by PCI device id), nvidia-smi's output on H200, B200,
GB200 and GB300.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class Architecture(Enum):
    """An architecture; the value is NVML's number for it."""

    VOLTA = 5
    TURING = 6
    AMPERE = 7
    ADA = 8
    HOPPER = 9
    BLACKWELL = 10


class Brand(Enum):
    """What a board is sold as; the value is NVML's number for it."""

    TESLA = 2
    NVIDIA = 14
    GEFORCE = 5


@dataclass(frozen=True, slots=True)
class MigProfile:
    """One MIG profile of a model."""

    name: str  # "3g.40gb", or "1g.10gb+me" with media engines
    index: int  # NVML's index of the profile
    id: int  # the driver's number of the profile, as ``nvidia-smi mig -lgip`` prints it
    slices: int  # compute slices, of seven
    memory_slices: int  # of eight
    memory: int  # MiB
    multiprocessors: int  # SMs
    starts: tuple[int, ...]  # memory slices it may start at
    instances: int  # the most instances of it on one GPU
    first_id: int  # ids of its GPU instances count from here
    copy_engines: int
    decoders: int  # NVDECs
    jpeg: int
    ofa: int  # optical flow engines


@dataclass(frozen=True, slots=True)
class Model:
    """One model of GPU."""

    name: str  # NVML's name
    device: int  # PCI device id
    subsystem: int  # PCI subsystem id (its vendor is NVIDIA)
    pci_class: int  # PCI class code; data-centre GPUs are 3D controllers, others VGA controllers
    memory: int  # MiB, as ``nvidia-smi`` shows it
    architecture: Architecture  # generation
    capability: tuple[int, int]  # of CUDA
    brand: Brand  # what it is sold as
    multiprocessors: int  # SMs
    cores: int  # CUDA cores
    power: int  # watts, the default limit
    clocks: tuple[int, int]  # highest (graphics, memory) clocks in MHz
    pcie: tuple[int, int]  # (generation, lanes)
    vbios: str  # the first two numbers of the video BIOS version
    profiles: tuple[MigProfile, ...] = ()  # MIG profiles; empty for a model without MIG
    driver: str = ""  # the first driver version that supports it; "" for any
    # PCI addresses of the first GPUs on their usual board; empty for the buses of an HGX
    addresses: tuple[str, ...] = ()


_3D: Final = 0x030200
_VGA: Final = 0x030000


def _mig(
    names: tuple[str, ...],
    memory: tuple[int, ...],
    multiprocessors: tuple[int, ...],
    media: tuple[tuple[int, int, int], ...],
    copies: tuple[int, ...] = (1, 1, 1, 2, 3, 4, 7),
) -> tuple[MigProfile, ...]:
    """Return the seven profiles that all MIG-capable models have, with one model's figures."""
    shapes = (
        # index, id, slices, memory slices, starts, instances, first id
        (0x0, 19, 1, 1, (0, 1, 2, 3, 4, 5, 6), 7, 7),
        (0x7, 20, 1, 1, (0, 1, 2, 3, 4, 5, 6), 1, 7),
        (0x9, 15, 1, 2, (0, 2, 4, 6), 4, 3),
        (0x1, 14, 2, 2, (0, 2, 4), 3, 3),
        (0x2, 9, 3, 4, (0, 4), 2, 1),
        (0x3, 5, 4, 4, (0,), 1, 1),
        (0x4, 0, 7, 8, (0,), 1, 0),
    )
    figures = zip(names, memory, multiprocessors, media, copies, shapes, strict=True)
    return tuple(
        MigProfile(name, index, number, slices, size, mib, sms, starts, most, first, engines, *rest)
        for name, mib, sms, rest, engines, (index, number, slices, size, starts, most, first) in (
            figures
        )
    )


_NO_MEDIA: Final = (0, 0, 0)
_A100_MEDIA: Final = (
    _NO_MEDIA, (1, 1, 1), (1, 0, 0), (1, 0, 0), (2, 0, 0), (2, 0, 0), (5, 1, 1),
)  # fmt: skip
_H100_MEDIA: Final = (
    (1, 1, 0), (1, 1, 1), (1, 1, 0), (2, 2, 0), (3, 3, 0), (4, 4, 0), (7, 7, 1),
)  # fmt: skip
_NAMES_40: Final = (
    "1g.5gb", "1g.5gb+me", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb",
)  # fmt: skip
_NAMES_80: Final = (
    "1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb",
)  # fmt: skip
_MIB_40: Final = (4864, 4864, 9856, 9856, 19968, 19968, 40192)
_MIB_80: Final = (9728, 9728, 19968, 19968, 40192, 40192, 80384)
_MIB_H100: Final = (9984, 9984, 20096, 20096, 40448, 40448, 80896)
_NAMES_H200: Final = (
    "1g.18gb", "1g.18gb+me", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb",
)  # fmt: skip
_MIB_H200: Final = (16384, 16384, 33280, 33280, 71424, 71424, 143360)
_HOPPER_COPIES: Final = (1, 1, 1, 2, 3, 4, 8)
_NAMES_B200: Final = (
    "1g.23gb", "1g.23gb+me", "1g.45gb", "2g.45gb", "3g.90gb", "4g.90gb", "7g.180gb",
)  # fmt: skip
_MIB_B200: Final = (22912, 22912, 45824, 45824, 91648, 91648, 183296)
_NAMES_GB200: Final = (
    "1g.23gb", "1g.23gb+me", "1g.47gb", "2g.47gb", "3g.93gb", "4g.93gb", "7g.186gb",
)  # fmt: skip
_MIB_GB200: Final = (23680, 23680, 47360, 47360, 94720, 94720, 189440)
_NAMES_GB300: Final = (
    "1g.35gb", "1g.35gb+me", "1g.70gb", "2g.70gb", "3g.139gb", "4g.139gb", "7g.278gb",
)  # fmt: skip
_MIB_GB300: Final = (35456, 35456, 71040, 71040, 142080, 142080, 284160)
_BLACKWELL_MEDIA: Final = (
    (1, 1, 0), (1, 1, 1), (1, 1, 0), (1, 1, 0), (1, 1, 0), (1, 1, 0), (1, 1, 1),
)  # fmt: skip
_BLACKWELL_COPIES: Final = (2, 2, 2, 3, 6, 8, 16)
_B200_SMS: Final = (18, 18, 18, 36, 54, 72, 148)
_GB200_SMS: Final = (18, 18, 18, 36, 54, 72, 152)
_A100_SMS: Final = (14, 14, 14, 28, 42, 56, 98)
_H100_SMS: Final = (16, 16, 26, 32, 60, 64, 132)

# One compute tray: each GPU has its own root port, and two GPUs share a Grace.
_GB200_TRAY: Final = ("0008:01:00.0", "0009:01:00.0", "0018:01:00.0", "0019:01:00.0")
_GB300_TRAY: Final = ("0008:06:00.0", "0009:06:00.0", "0018:06:00.0", "0019:06:00.0")

MODELS: Final = {
    "gb300": Model(
        name="NVIDIA GB300", device=0x31C2, subsystem=0x2046, pci_class=_3D,
        memory=284208, architecture=Architecture.BLACKWELL, capability=(10, 3), brand=Brand.NVIDIA,
        multiprocessors=152, cores=19456, power=1400, clocks=(2062, 3996), pcie=(5, 16),
        vbios="97.10", driver="580.65.06", addresses=_GB300_TRAY,
        profiles=_mig(_NAMES_GB300, _MIB_GB300, _GB200_SMS, _BLACKWELL_MEDIA, _BLACKWELL_COPIES),
    ),
    "gb200": Model(
        name="NVIDIA GB200", device=0x2941, subsystem=0x2046, pci_class=_3D,
        memory=189471, architecture=Architecture.BLACKWELL, capability=(10, 0), brand=Brand.NVIDIA,
        multiprocessors=152, cores=19456, power=1200, clocks=(2062, 3996), pcie=(5, 16),
        vbios="97.00", driver="570.86.15", addresses=_GB200_TRAY,
        profiles=_mig(_NAMES_GB200, _MIB_GB200, _GB200_SMS, _BLACKWELL_MEDIA, _BLACKWELL_COPIES),
    ),
    "b200": Model(
        name="NVIDIA B200", device=0x2901, subsystem=0x1999, pci_class=_3D,
        memory=183359, architecture=Architecture.BLACKWELL, capability=(10, 0), brand=Brand.NVIDIA,
        multiprocessors=148, cores=18944, power=1000, clocks=(1965, 3996), pcie=(5, 16),
        vbios="97.00", driver="570.86.15",
        profiles=_mig(_NAMES_B200, _MIB_B200, _B200_SMS, _BLACKWELL_MEDIA, _BLACKWELL_COPIES),
    ),
    "h200": Model(
        name="NVIDIA H200", device=0x2335, subsystem=0x18BE, pci_class=_3D,
        memory=143771, architecture=Architecture.HOPPER, capability=(9, 0), brand=Brand.NVIDIA,
        multiprocessors=132, cores=16896, power=700, clocks=(1980, 3201), pcie=(5, 16),
        vbios="96.00", driver="550.54.15",
        profiles=_mig(_NAMES_H200, _MIB_H200, _H100_SMS, _H100_MEDIA, _HOPPER_COPIES),
    ),
    "h100": Model(
        name="NVIDIA H100 80GB HBM3", device=0x2330, subsystem=0x16C1, pci_class=_3D,
        memory=81559, architecture=Architecture.HOPPER, capability=(9, 0), brand=Brand.NVIDIA,
        multiprocessors=132, cores=16896, power=700, clocks=(1980, 2619), pcie=(5, 16),
        vbios="96.00",
        profiles=_mig(_NAMES_80, _MIB_H100, _H100_SMS, _H100_MEDIA, _HOPPER_COPIES),
    ),
    "a100-80gb": Model(
        name="NVIDIA A100-SXM4-80GB", device=0x20B2, subsystem=0x1463, pci_class=_3D,
        memory=81920, architecture=Architecture.AMPERE, capability=(8, 0), brand=Brand.NVIDIA,
        multiprocessors=108, cores=6912, power=400, clocks=(1410, 1593), pcie=(4, 16),
        vbios="92.00", profiles=_mig(_NAMES_80, _MIB_80, _A100_SMS, _A100_MEDIA),
    ),
    "a100": Model(
        name="NVIDIA A100-SXM4-40GB", device=0x20B0, subsystem=0x1450, pci_class=_3D,
        memory=40960, architecture=Architecture.AMPERE, capability=(8, 0), brand=Brand.NVIDIA,
        multiprocessors=108, cores=6912, power=400, clocks=(1410, 1215), pcie=(4, 16),
        vbios="92.00", profiles=_mig(_NAMES_40, _MIB_40, _A100_SMS, _A100_MEDIA),
    ),
    "l40s": Model(
        name="NVIDIA L40S", device=0x26B9, subsystem=0x1851, pci_class=_3D,
        memory=46068, architecture=Architecture.ADA, capability=(8, 9), brand=Brand.NVIDIA,
        multiprocessors=142, cores=18176, power=350, clocks=(2520, 9001), pcie=(4, 16),
        vbios="95.02",
    ),
    "l4": Model(
        name="NVIDIA L4", device=0x27B8, subsystem=0x16CA, pci_class=_3D,
        memory=23034, architecture=Architecture.ADA, capability=(8, 9), brand=Brand.NVIDIA,
        multiprocessors=58, cores=7424, power=72, clocks=(2040, 6251), pcie=(4, 16),
        vbios="95.04",
    ),
    "t4": Model(
        name="Tesla T4", device=0x1EB8, subsystem=0x12A2, pci_class=_3D,
        memory=15360, architecture=Architecture.TURING, capability=(7, 5), brand=Brand.TESLA,
        multiprocessors=40, cores=2560, power=70, clocks=(1590, 5001), pcie=(3, 16),
        vbios="90.04",
    ),
    "v100": Model(
        name="Tesla V100-SXM2-16GB", device=0x1DB1, subsystem=0x1212, pci_class=_3D,
        memory=16384, architecture=Architecture.VOLTA, capability=(7, 0), brand=Brand.TESLA,
        multiprocessors=80, cores=5120, power=300, clocks=(1530, 877), pcie=(3, 16),
        vbios="88.00",
    ),
    "rtx4090": Model(
        name="NVIDIA GeForce RTX 4090", device=0x2684, subsystem=0x16F3, pci_class=_VGA,
        memory=24564, architecture=Architecture.ADA, capability=(8, 9), brand=Brand.GEFORCE,
        multiprocessors=128, cores=16384, power=450, clocks=(3105, 10501), pcie=(4, 16),
        vbios="95.02",
    ),
}  # fmt: skip
