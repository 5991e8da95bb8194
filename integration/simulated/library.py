"""Building the NVML library of a node, and the driver files that are only stood in for.

``nvml.c`` is compiled with two headers written here: the scenario as tables of C, and the names
of what it leaves unsupported. These names are read from the driver's own library, so that a
program finds in ours every symbol it finds in the real one.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from typing import TYPE_CHECKING, Final

from integration.simulated.capabilities import access_minor
from integration.simulated.catalogue import MODELS
from integration.simulated.errors import DriverIncomplete, LibraryNotBuilt
from integration.simulated.nvidia import VENDOR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from integration.simulated.catalogue import MigProfile
    from integration.simulated.scenario import Gpu, Scenario

SONAME: Final = "libnvidia-ml.so.1"

_SOURCE: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "nvml.c")
_DEFINED: Final = re.compile(r"^(?:API .*?(nvml\w+)\(|[A-Z0-9_]+\((nvml\w+),)", re.MULTILINE)


def build_nvml(target: str, scenario: Scenario, *, driver: str, real: str, node: str) -> None:
    """Compile the NVML library of a node.

    Args:
        real: path of the driver's own NVML library, for the names in it.

    Raises:
        LibraryNotBuilt: there is no compiler, or it refused.
        DriverIncomplete: ``real`` is not a library.
    """
    with open(_SOURCE, encoding="utf-8") as file:
        defined = {name for pair in _DEFINED.findall(file.read()) for name in pair if name}
    missing = sorted(set(exported_names(real)) - defined)
    headers = {
        "scenario.h": scenario_header(scenario, driver=driver, node=node),
        "unsupported.h": "".join(f"UNSUPPORTED({name})\n" for name in missing),
        "names": _visibility(scenario.nvml_lacks),
    }
    with tempfile.TemporaryDirectory(prefix="nvml-") as work:
        for name, text in headers.items():
            with open(os.path.join(work, name), "w", encoding="utf-8") as file:
                file.write(text)
        # Not optimised: a node is made often and asked little.
        _compile(target, SONAME, _SOURCE, "-O0", f"-I{work}", f"-Wl,--version-script={work}/names")


def _visibility(lacking: Sequence[str]) -> str:
    """The linker's script that hides functions, so that nobody finds them."""
    hidden = " local: " + " ".join(f"{name};" for name in lacking) if lacking else ""
    return f"{{ global: *;{hidden} }};\n"


def build_stand_in(target: str, soname: str) -> None:
    """Make a library with a name and nothing in it.

    Raises:
        LibraryNotBuilt: there is no compiler, or it refused.
    """
    _compile(target, soname, "/dev/null", "-x", "c", "-nostdlib")


def exported_names(library: str) -> list[str]:
    """The names of NVML functions that a library exports.

    Returns:
        Names that begin with "nvml", versions included ("nvmlInit_v2").

    Raises:
        LibraryNotBuilt: there are no binutils.
        DriverIncomplete: it is not a library.
    """
    done = _run(["nm", "-D", "--defined-only", "--format=posix", library])
    names = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("nvml")]
    if done.returncode or not names:
        raise DriverIncomplete(
            f"read the names in {library}",
            found=done.stderr.strip() or "none of NVML",
            do="fetch the driver's packages anew",
        )
    return names


def scenario_header(scenario: Scenario, *, driver: str, node: str) -> str:
    """The tables of ``nvml.c``."""
    major, minor = scenario.cuda_version(driver)
    keys = list(dict.fromkeys(gpu.key for gpu in scenario.gpus))
    instances = [(gpu, instance) for gpu in scenario.gpus for instance in gpu.mig or ()]
    rows = [
        _row(
            f"&INSTANCES[{n}]", compute.uuid, instance.device_name(compute), compute.id,
            compute.slices, compute.start, access_minor(gpu.minor, instance.id, compute.id),
        )
        for n, (gpu, instance) in enumerate(instances)
        for compute in instance.compute
    ]  # fmt: skip
    tables = [
        *(_table("struct profile", f"PROFILES_{keys.index(key)}",
                 [*map(_profile_row, MODELS[key].profiles), "{0}"]) for key in keys),
        _table("struct gpu", "GPUS", [_gpu_row(gpu, keys.index(gpu.key)) for gpu in scenario.gpus]),
        _table("struct instance", "INSTANCES", [
            _row(f"&GPUS[{gpu.index}]",
                 f"&PROFILES_{keys.index(gpu.key)}[{gpu.model.profiles.index(instance.profile)}]",
                 instance.id, instance.start, access_minor(gpu.minor, instance.id))
            for gpu, instance in instances
        ]),
        _table("struct mig", "MIG", rows),
    ]  # fmt: skip
    macros = {
        "DEV": _quoted(os.path.join(node, "dev")),
        "STATE": _quoted(os.path.join(node, "state")),
        "DRIVER_VERSION": _quoted(driver),
        # NVML numbers itself by the newest CUDA major at the time and the driver's version.
        "NVML_VERSION": _quoted(f"{major}.{driver}"),
        "CUDA_VERSION": str(major * 1000 + minor * 10),
    }
    # Variables, since a compiler wonders at a comparison with a constant 0.
    counts = {
        "GPU_COUNT": len(scenario.gpus),
        "INSTANCE_COUNT": len(instances),
        "MIG_COUNT": len(rows),
    }
    return "".join([
        *(f"#define {name} {value}\n" for name, value in macros.items()),
        *(f"static const u32 {name} = {value};\n" for name, value in counts.items()),
        *tables,
    ])  # fmt: skip


def _gpu_row(gpu: Gpu, profiles: int) -> str:
    model = gpu.model
    domain, bus, device = (int(part.split(".")[0], 16) for part in gpu.pci.split(":"))
    return _row(
        model.name, gpu.uuid, gpu.serial, gpu.vbios,
        gpu.minor, domain, bus, device,
        model.device << 16 | VENDOR, model.subsystem << 16 | VENDOR,
        model.architecture.value, *model.capability, model.brand.value,
        model.cores, model.multiprocessors,
        model.power * 1000, *model.clocks, *model.pcie, gpu.numa_node,
        model.memory, int(bool(model.profiles)), int(gpu.mig is not None),
        f"&PROFILES_{profiles}[0]",
    )  # fmt: skip


def _profile_row(profile: MigProfile) -> str:
    starts = ", ".join(map(str, (*profile.starts, -1)))
    row = _row(
        profile.name, profile.index, profile.id, profile.slices, profile.instances,
        profile.memory_slices, profile.multiprocessors,
        profile.copy_engines, profile.decoders, profile.jpeg, profile.ofa, profile.memory,
    )  # fmt: skip
    return row.removesuffix("}") + f", {{{starts}}}}}"


def _row(*values: str | int) -> str:
    """An initialiser; a text that begins with "&" is an address, any other is quoted."""
    return "{" + ", ".join(
        str(value) if isinstance(value, int) or value.startswith("&") else _quoted(value)
        for value in values
    ) + "}"  # fmt: skip


def _table(kind: str, name: str, rows: Sequence[str]) -> str:
    # An array of C has one element at least; the counts say how many are meant.
    body = ",\n    ".join(rows or ["{0}"])
    return f"static const {kind} {name}[] = {{\n    {body}\n}};\n"


def _quoted(text: str) -> str:
    escaped = "".join(
        chr(byte)
        if chr(byte).isascii() and (chr(byte).isalnum() or byte in b" ._-/:+")
        else f"\\{byte:03o}"
        for byte in os.fsencode(text)
    )
    return f'"{escaped}"'


def _compile(target: str, soname: str, source: str, *arguments: str) -> None:
    done = _run([
        "gcc", "-std=gnu11", "-shared", "-fPIC", "-fvisibility=hidden", f"-Wl,-soname,{soname}",
        "-Wl,--build-id=none", *arguments, "-o", target, source,
    ])  # fmt: skip
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise LibraryNotBuilt(
            f"compile {os.path.basename(target)}",
            found=(errors or done.stderr.splitlines() or ["no explanation"])[0],
            do="install the packages gcc and libc6-dev",
        )


def _run(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    try:
        return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise LibraryNotBuilt(
            f"run {argv[0]}",
            found="it is not installed",
            do="install the packages gcc and libc6-dev",
        ) from error
