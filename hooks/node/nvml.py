"""Asking NVML without loading it: the command to run, and the meaning of what it prints.

The engine starts no process. Whoever calls it runs :func:`probe_command` with its own reaper
and timeout, and hands the bytes to :func:`parse_report`. They come from a foreign library that
may be of another version or broken, so every field is checked before it is believed.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any, Final, TypeVar

from api.errors import one_line
from api.values import value
from hooks.errors import NvmlFailed

if TYPE_CHECKING:
    from hooks.config import Config
    from hooks.node.driver import Driver

__all__ = [
    "MigReport",
    "NvmlGpu",
    "NvmlReport",
    "library_path",
    "modules_directory",
    "parse_report",
    "probe_command",
]

_LIBRARY: Final = "libnvidia-ml.so.{v}"
_PROBE: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "nvml_probe.py")

# A node has at most some tens of GPUs with seven MIG devices each, of 300 bytes.
_MOST_BYTES: Final = 1 << 20
_MOST_GPUS: Final = 256
_LONGEST_TEXT: Final = 128
_MOST_NOTES: Final = 16


@value
class MigReport:
    """A MIG device as NVML tells of it; the fields are those of :class:`gpus.MigDevice`."""

    index: int
    uuid: str
    gpu_instance: int
    compute_instance: int
    profile: str


@value
class NvmlGpu:
    """A GPU as NVML tells of it.

    Attributes:
        index: NVML's index.
        uuid: "GPU-…" in lower case; "" if NVML did not say.
        minor: the number of its node; None if NVML did not say.
        bus_id: its PCI address as sysfs writes it ("0000:07:00.0"); "" if NVML did not say.
        name: its name for people; "" if NVML did not say.
        memory: bytes of memory in all; None if it has none of its own.
        mig: whether MIG mode is on.
        mig_devices: its MIG devices, by index.
        compute_capability: of CUDA ("9.0"); "" if NVML did not say.
        brand: what it is sold as, a word of :data:`BRANDS`; "" if NVML did not say.
        lost: why it is lost (:mod:`hooks.node.nvml_asking`); "" if it is not. Of a lost one NVML
            said what it had said before.
    """

    index: int
    uuid: str = ""
    minor: int | None = None
    bus_id: str = ""
    name: str = ""
    memory: int | None = None
    mig: bool = False
    mig_devices: tuple[MigReport, ...] = ()
    compute_capability: str = ""
    brand: str = ""
    lost: str = ""


@value
class NvmlReport:
    """All that NVML told.

    Attributes:
        driver: the driver's version.
        gpus: the GPUs, by index, the lost ones too.
        cuda: the newest CUDA that the driver supports ("12.2"); "" if it did not say.
        notes: the values that could not be had, a line each.
    """

    driver: str
    gpus: tuple[NvmlGpu, ...]
    cuda: str = ""
    notes: tuple[str, ...] = ()


# nvmlBrandType_t, in the words in which images write them into NVIDIA_REQUIRE_CUDA.
BRANDS: Final = (
    "unknown", "quadro", "tesla", "nvs", "grid", "geforce", "titan", "nvidiavapps", "nvidiavpc",
    "nvidiavcs", "nvidiavws", "nvidiavgaming", "quadrortx", "nvidiartx", "nvidia", "geforcertx",
    "titanrtx",
)  # fmt: skip


def probe_command(config: Config, driver: Driver) -> tuple[str, ...]:
    """The command that asks NVML.

    Args:
        config: how long it may take.
        driver: whose NVML library is asked.

    Returns:
        The argument list, the program's absolute path first. It needs no environment and
        reads no input; its answer is on stdout.
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
    """The driver's NVML library.

    Args:
        driver: whose it is.

    Returns:
        Its path; its bare name if the driver has none, so that whoever loads it says so.
    """
    return next(
        (
            library.source
            for library in driver.libraries
            if library.row == _LIBRARY and library.arch is driver.arch
        ),
        _LIBRARY.format(v=driver.version),
    )


def parse_report(answer: bytes) -> NvmlReport:
    """The meaning of what the command printed.

    Args:
        answer: all of its stdout.

    Returns:
        The report, each of its fields checked.

    Raises:
        NvmlFailed: NVML failed, or the answer is not one.
    """
    if len(answer) > _MOST_BYTES:
        raise _nonsense(f"{len(answer)} bytes")
    if not answer.strip():
        raise _nonsense("nothing: NVML crashed, or took longer than nvml-timeout")
    try:
        report = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise _nonsense("no JSON") from error
    if isinstance(report, dict) and isinstance(report.get("error"), str):
        raise NvmlFailed(
            "NVML's list of GPUs",
            found=report["error"],
            do="see that nvidia-smi works on the node",
        )
    gpus = _field(report, "gpus", list)
    if len(gpus) > _MOST_GPUS:
        raise _nonsense(f"{len(gpus)} GPUs")
    return NvmlReport(
        driver=_text(report, "driver"),
        gpus=tuple(_gpu(gpu) for gpu in gpus),
        cuda=_cuda(report),
        notes=_notes(report),
    )


def _gpu(entry: Any) -> NvmlGpu:
    if _is_said(entry, "lost"):
        return NvmlGpu(
            index=_number(entry, "index"),
            uuid=_uuid(entry, "GPU") if _is_said(entry, "uuid") else "",
            minor=_number_or_none(entry, "minor"),
            bus_id=_bus_id(entry),
            lost=one_line(_field(entry, "lost", str)) or "NVML does not say why",
        )
    devices = _field(entry, "mig_devices", list)
    if len(devices) > _MOST_GPUS:
        raise _nonsense(f"{len(devices)} MIG devices")
    return NvmlGpu(
        index=_number(entry, "index"),
        uuid=_uuid(entry, "GPU") if _is_said(entry, "uuid") else "",
        minor=_number_or_none(entry, "minor"),
        bus_id=_bus_id(entry),
        name=_text(entry, "name") if _is_said(entry, "name") else "",
        memory=_number_or_none(entry, "memory"),
        mig=_field(entry, "mig", bool),
        mig_devices=tuple(
            MigReport(
                index=_number(device, "index"),
                uuid=_uuid(device, "MIG"),
                gpu_instance=_number(device, "gpu_instance"),
                compute_instance=_number(device, "compute_instance"),
                profile=_text(device, "profile"),
            )
            for device in devices
        ),
        compute_capability=_text(entry, "compute_capability")
        if _is_said(entry, "compute_capability")
        else "",
        brand=_brand(entry),
    )


def _is_said(entry: Any, name: str) -> bool:
    """Whether there is a value: not every driver and GPU has an answer to everything."""
    return isinstance(entry, dict) and entry.get(name) is not None


def _number_or_none(entry: Any, name: str) -> int | None:
    return _number(entry, name) if _is_said(entry, name) else None


def _notes(report: Any) -> tuple[str, ...]:
    lines = _field(report, "notes", list) if "notes" in report else []
    # Of a broken driver every answer may be one; people need the first few.
    return tuple(one_line(line) for line in lines[:_MOST_NOTES] if isinstance(line, str))


def _cuda(report: Any) -> str:
    """NVML says 12020 for 12.2."""
    if not _is_said(report, "cuda"):
        return ""
    number = _number(report, "cuda")
    return f"{number // 1000}.{number % 1000 // 10}"


def _brand(entry: Any) -> str:
    if not _is_said(entry, "brand"):
        return ""
    number = _number(entry, "brand")
    # A newer NVML has newer ones; what they are called is not known.
    return BRANDS[number] if number < len(BRANDS) else ""


_Kind = TypeVar("_Kind")


def _field(entry: Any, name: str, kind: type[_Kind]) -> _Kind:
    value = entry.get(name) if isinstance(entry, dict) else None
    # bool is an int for isinstance, and no number for us
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _nonsense(f"{name} = {value!r}")
    return value


def _number(entry: Any, name: str) -> int:
    value = _field(entry, name, int)
    if not 0 <= value < 1 << 63:
        raise _nonsense(f"{name} = {value!r}")
    return value


def _text(entry: Any, name: str) -> str:
    value = _field(entry, name, str)
    if len(value) > _LONGEST_TEXT or not value.isprintable():
        raise _nonsense(f"{name} = {value!r}")
    return value


_UUID_LENGTH: Final = 36


def _uuid(entry: Any, kind: str) -> str:
    prefix, _, digits = _text(entry, "uuid").partition("-")
    if prefix != kind or len(digits) != _UUID_LENGTH or not digits.replace("-", "").isalnum():
        raise _nonsense(f"uuid = {entry['uuid']!r}")
    return f"{kind}-{digits.lower()}"


_DOMAIN_DIGITS: Final = 4


def _bus_id(entry: Any) -> str:
    """NVML writes the domain with eight digits ("00000000:07:00.0"), sysfs with four or more."""
    if not _is_said(entry, "bus_id"):
        return ""
    text = _text(entry, "bus_id").lower()
    domain, _, rest = text.partition(":")
    try:
        number = int(domain, 16)
    except ValueError as error:
        raise _nonsense(f"bus_id = {text!r}") from error
    return f"{number:0{_DOMAIN_DIGITS}x}:{rest}"


def _nonsense(found: str) -> NvmlFailed:
    return NvmlFailed(
        "NVML's list of GPUs",
        found=f"an answer that makes no sense: {found}",
        do="see that nvidia-smi works on the node",
    )


def modules_directory() -> str:
    """Where pynvml is, without importing it (24 ms and 5 MB)."""
    for directory in sys.path:
        if os.path.isfile(os.path.join(directory, "pynvml.py")):
            return os.path.abspath(directory)
    return ""
