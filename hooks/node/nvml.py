"""Query NVML without loading it: the command to run, and the meaning of its output.

The engine starts no process. Its caller runs :func:`probe_command` with its own reaper and timeout,
and passes the output to :func:`parse_report`. The output comes from a foreign library, perhaps
broken or of another version, so every field is checked.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Final, TypeVar

from api.errors import one_line
from api.values import dataclass, replace
from hooks.config import Config
from hooks.errors import NvmlFailed
from hooks.node.driver import Driver

_LIBRARY: Final = "libnvidia-ml.so.{v}"
_PROBE: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "nvml_probe.py")

# A node has at most some tens of GPUs, with seven MIG devices of 300 bytes each.
_MOST_BYTES: Final = 1 << 20
_MOST_GPUS: Final = 256
_LONGEST_TEXT: Final = 128
_MOST_NOTES: Final = 16


@dataclass(frozen=True, slots=True)
class MigReport:
    """A MIG device as NVML reports it; the fields are those of :class:`gpus.MigDevice`."""

    index: int
    uuid: str
    gpu_instance: int
    compute_instance: int
    profile: str


@dataclass(frozen=True, slots=True)
class NvmlGpu:
    """A GPU as NVML reports it."""

    index: int
    uuid: str = ""  # "GPU-…" in lower case; "" if not reported
    minor: int | None = None  # the number of its node; None if not reported
    bus_id: str = ""  # its PCI address in sysfs form ("0000:07:00.0"); "" if not reported
    name: str = ""
    memory: int | None = None  # total memory in bytes; None if it has none of its own
    mig: bool = False
    mig_devices: tuple[MigReport, ...] = ()
    compute_capability: str = ""  # CUDA's ("9.0"); "" if not reported
    brand: str = ""  # its product line, a word of BRANDS; "" if not reported
    architecture: str = ""  # ("Hopper"); "" if not reported, or if too new
    # why it is lost (hooks.node.nvml_probe); "" if it is not. For a lost GPU, the other fields have
    # what NVML had reported before.
    lost: str = ""


@dataclass(frozen=True, slots=True)
class NvmlReport:
    """NVML's report."""

    driver: str
    gpus: tuple[NvmlGpu, ...]  # the GPUs, by index, including lost ones
    cuda: str = ""  # the newest CUDA that the driver supports ("12.2"); "" if not reported
    notes: tuple[str, ...] = ()  # the unreadable values, a line each


# nvmlBrandType_t, in the words that images use in NVIDIA_REQUIRE_CUDA.
BRANDS: Final = (
    "unknown", "quadro", "tesla", "nvs", "grid", "geforce", "titan", "nvidiavapps", "nvidiavpc",
    "nvidiavcs", "nvidiavws", "nvidiavgaming", "quadrortx", "nvidiartx", "nvidia", "geforcertx",
    "titanrtx",
)  # fmt: skip


# nvmlDeviceArchitecture_t, in NVIDIA's words.
_ARCHITECTURES: Final = {
    2: "Kepler", 3: "Maxwell", 4: "Pascal", 5: "Volta", 6: "Turing", 7: "Ampere",
    8: "Ada Lovelace", 9: "Hopper", 10: "Blackwell", 13: "Rubin",
}  # fmt: skip


def probe_command(config: Config, driver: Driver) -> tuple[str, ...]:
    """Return the command that queries NVML.

    Returns:
        The argument list, from the program's absolute path on. It needs no environment and no
        input; its answer is on stdout.
    """
    return (
        sys.executable,
        "-I",
        "-S",
        _PROBE,
        f"{config.nvml_timeout:g}",
        library_path(driver),
        modules_directory(),
    )


def library_path(driver: Driver) -> str:
    """Return the driver's NVML library; if it has none, a bare name, which then fails to load."""
    return next(
        (
            library.source
            for library in driver.libraries
            if library.row == _LIBRARY and library.arch is driver.arch
        ),
        _LIBRARY.format(v=driver.version),
    )


def parse_report(answer: bytes) -> NvmlReport:
    """Parse the command's output, and check each field.

    Raises:
        NvmlFailed: NVML failed, or the answer is not a report.
    """
    if len(answer) > _MOST_BYTES:
        raise _malformed(f"{len(answer)} bytes")
    if not answer.strip():
        raise _malformed("nothing: NVML crashed, or took longer than nvml-timeout")
    try:
        report = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise _malformed("no JSON") from error
    if isinstance(report, dict) and isinstance(report.get("error"), str):
        raise NvmlFailed(
            "NVML's list of GPUs",
            found=report["error"],
            do="see that nvidia-smi works on the node",
        )
    gpus = _field(report, "gpus", list)
    if len(gpus) > _MOST_GPUS:
        raise _malformed(f"{len(gpus)} GPUs")
    return NvmlReport(
        driver=_text(report, "driver"),
        gpus=tuple(_gpu(gpu) for gpu in gpus),
        cuda=_cuda(report),
        notes=_notes(report),
    )


def _gpu(entry: Any) -> NvmlGpu:
    gpu = NvmlGpu(
        index=_number(entry, "index"),
        uuid=_uuid(entry, "GPU") if _is_known(entry, "uuid") else "",
        minor=_number(entry, "minor") if _is_known(entry, "minor") else None,
        bus_id=_bus_id(entry),
    )
    if _is_known(entry, "lost"):
        return replace(gpu, lost=one_line(_field(entry, "lost", str)) or "NVML does not say why")
    devices = _field(entry, "mig_devices", list)
    if len(devices) > _MOST_GPUS:
        raise _malformed(f"{len(devices)} MIG devices")
    return replace(
        gpu,
        name=_text(entry, "name") if _is_known(entry, "name") else "",
        memory=_number(entry, "memory") if _is_known(entry, "memory") else None,
        mig=_field(entry, "mig", bool),
        mig_devices=tuple(map(_mig_device, devices)),
        compute_capability=_text(entry, _CAPABILITY) if _is_known(entry, _CAPABILITY) else "",
        brand=_brand(entry),
        architecture=_architecture(entry),
    )


_CAPABILITY: Final = "compute_capability"


def _mig_device(entry: Any) -> MigReport:
    return MigReport(
        index=_number(entry, "index"),
        uuid=_uuid(entry, "MIG"),
        gpu_instance=_number(entry, "gpu_instance"),
        compute_instance=_number(entry, "compute_instance"),
        profile=_text(entry, "profile"),
    )


def _is_known(entry: Any, name: str) -> bool:
    """Whether a value is known: not every driver and GPU has all values."""
    return isinstance(entry, dict) and entry.get(name) is not None


def _notes(report: Any) -> tuple[str, ...]:
    lines = _field(report, "notes", list) if "notes" in report else []
    # With a broken driver, every answer may be one; the first few are enough.
    return tuple(one_line(line) for line in lines[:_MOST_NOTES] if isinstance(line, str))


def _cuda(report: Any) -> str:
    """Return a CUDA version; NVML reports 12.2 as 12020."""
    number = _number(report, "cuda") if _is_known(report, "cuda") else 0
    return f"{number // 1000}.{number % 1000 // 10}" if _is_known(report, "cuda") else ""


def _brand(entry: Any) -> str:
    number = _number(entry, "brand") if _is_known(entry, "brand") else len(BRANDS)
    # A newer NVML may have more, with unknown names.
    return BRANDS[number] if number < len(BRANDS) else ""


def _architecture(entry: Any) -> str:
    is_known = _is_known(entry, "architecture")
    return _ARCHITECTURES.get(_number(entry, "architecture"), "") if is_known else ""


_Kind = TypeVar("_Kind")


def _field(entry: Any, name: str, kind: type[_Kind]) -> _Kind:
    value = entry.get(name) if isinstance(entry, dict) else None
    # to isinstance, a bool is an int
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _malformed(f"{name} = {value!r}")
    return value


def _number(entry: Any, name: str) -> int:
    value = _field(entry, name, int)
    if not 0 <= value < 1 << 63:
        raise _malformed(f"{name} = {value!r}")
    return value


def _text(entry: Any, name: str) -> str:
    value = _field(entry, name, str)
    if len(value) > _LONGEST_TEXT or not value.isprintable():
        raise _malformed(f"{name} = {value!r}")
    return value


_UUID_LENGTH: Final = 36


def _uuid(entry: Any, kind: str) -> str:
    prefix, _, digits = _text(entry, "uuid").partition("-")
    if prefix != kind or len(digits) != _UUID_LENGTH or not digits.replace("-", "").isalnum():
        raise _malformed(f"uuid = {entry['uuid']!r}")
    return f"{kind}-{digits.lower()}"


_DOMAIN_DIGITS: Final = 4


def _bus_id(entry: Any) -> str:
    """Return an address in sysfs form: NVML's domain has eight digits ("00000000:07:00.0")."""
    if not _is_known(entry, "bus_id"):
        return ""
    text = _text(entry, "bus_id").lower()
    domain, _, rest = text.partition(":")
    try:
        number = int(domain, 16)
    except ValueError as error:
        raise _malformed(f"bus_id = {text!r}") from error
    return f"{number:0{_DOMAIN_DIGITS}x}:{rest}"


def _malformed(found: str) -> NvmlFailed:
    return NvmlFailed(
        "NVML's list of GPUs",
        found=f"an answer that makes no sense: {found}",
        do="see that nvidia-smi works on the node",
    )


def modules_directory() -> str:
    """Return the directory of pynvml, without importing it (which costs 24 ms and 5 MB)."""
    for directory in sys.path:
        if os.path.isfile(os.path.join(directory, "pynvml.py")):
            return os.path.abspath(directory)
    return ""
