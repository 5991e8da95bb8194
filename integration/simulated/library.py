"""Build the NVML library of a node, and stand-ins for other driver libraries.

``nvml.c`` is compiled once for a driver, with stubs for all functions that it does not implement.
Their names are read from the driver's own library, so a program finds every symbol of the real one.
A node's library is that object linked with the scenario as C tables. A process compiles the tables
of a scenario once, with space for a node's paths, which are then written into the linked file.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Final

from integration.simulated.capabilities import access_minor
from integration.simulated.catalogue import MODELS, MigProfile
from integration.simulated.errors import DriverIncomplete, LibraryNotBuilt
from integration.simulated.nvidia import VENDOR
from integration.simulated.scenario import Gpu, Scenario

SONAME: Final = "libnvidia-ml.so.1"

_HERE: Final = os.path.dirname(os.path.abspath(__file__))
_DEFINED: Final = re.compile(r"^(?:API .*?(nvml\w+)\(|[A-Z0-9_]+\((nvml\w+),)", re.MULTILINE)
# The paths of node directories in the library, and the bytes reserved for each.
_PLACES: Final = {"NODE_DEV": "dev", "NODE_STATE": "state"}
_LONGEST: Final = 4096
# Not optimised: libraries are built often, and called rarely.
_FLAGS: Final = (
    "-std=gnu11", "-fPIC", "-fvisibility=hidden", "-O0", f"-I{_HERE}",
    # The default elsewhere. With the other dialect the library would need glibc's ld-linux.so.
    *(("-mtls-dialect=gnu2",) if platform.machine() == "x86_64" else ()),
)  # fmt: skip


def build_nvml(
    target: str, scenario: Scenario, *, driver: str, real: str, node: str, cache: str
) -> None:
    """Build the NVML library of a node.

    Args:
        real: path of the driver's own NVML library, for its symbol names.
        cache: the directory for parts that all nodes share.

    Raises:
        LibraryNotBuilt: there is no compiler, or it failed.
        DriverIncomplete: ``real`` is not a library.
    """
    made = _linked(
        _tables(scenario, driver=driver), _visibility(scenario.nvml_lacks), _common(real, cache)
    )
    for name, below in _PLACES.items():
        path = os.fsencode(os.path.join(node, below))
        made = made.replace(_room(name), path.ljust(_LONGEST, b"\0"))
    with open(target, "xb", opener=lambda path, flags: os.open(path, flags, 0o755)) as file:
        file.write(made)


@functools.lru_cache(maxsize=32)
def _linked(tables: str, visibility: str, common: str) -> bytes:
    """Return the library of these tables, with space for the paths of a node."""
    with tempfile.TemporaryDirectory(prefix="nvml-") as work:
        source, names, target = (os.path.join(work, n) for n in ("tables.c", "names", SONAME))
        _write(source, tables)
        _write(names, visibility)
        _link(target, SONAME, *_FLAGS, f"-Wl,--version-script={names}", source, common)
        with open(target, "rb") as file:
            return file.read()


def _room(name: str) -> bytes:
    """Return the placeholder for a path."""
    return name.encode().ljust(_LONGEST, b"\0")


def _common(real: str, cache: str) -> str:
    """Return the path of the object compiled from ``nvml.c`` for a driver's library."""
    sources = [_read(os.path.join(_HERE, name)) for name in ("nvml.c", "nvml.h")]
    status = os.stat(real)
    key = repr((sources, _FLAGS, os.path.realpath(real), status.st_size, status.st_mtime_ns))
    kept = os.path.join(cache, f"nvml-{hashlib.sha256(key.encode()).hexdigest()[:16]}.o")
    if not os.path.exists(kept):
        defined = {name for pair in _DEFINED.findall(sources[0]) for name in pair if name}
        missing = sorted(set(exported_names(real)) - defined)
        with tempfile.TemporaryDirectory(prefix="nvml-", dir=cache) as work:
            _write(
                os.path.join(work, "unsupported.h"),
                "".join(f"UNSUPPORTED({name})\n" for name in missing),
            )
            made = os.path.join(work, "nvml.o")
            _gcc(made, *_FLAGS, f"-I{work}", "-c", os.path.join(_HERE, "nvml.c"), what=SONAME)
            os.rename(made, kept)
    return kept


def _visibility(lacking: Sequence[str]) -> str:
    """Return the linker's version script that hides functions."""
    hidden = " local: " + " ".join(f"{name};" for name in lacking) if lacking else ""
    return f"{{ global: *;{hidden} }};\n"


def build_stand_in(target: str, soname: str) -> None:
    """Build an empty library with a soname.

    Raises:
        LibraryNotBuilt: there is no compiler, or it failed.
    """
    _link(target, soname, "-fPIC", "-nostdlib", "-x", "c", "/dev/null")


def exported_names(library: str) -> list[str]:
    """Return the names of NVML functions that a library exports.

    Returns:
        The names that start with "nvml", including versioned ones ("nvmlInit_v2").

    Raises:
        LibraryNotBuilt: binutils are not installed.
        DriverIncomplete: it is not a library.
    """
    done = _run(["nm", "-D", "--defined-only", "--format=posix", library])
    names = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("nvml")]
    if done.returncode or not names:
        raise DriverIncomplete(
            f"to read the symbols of {library}",
            found=done.stderr.strip() or "it exports no NVML functions",
            do="download the driver's packages again",
        )
    return names


def _tables(scenario: Scenario, *, driver: str) -> str:
    """Return C source that defines what ``nvml.h`` declares."""
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
        *(_table("static const struct profile", f"PROFILES_{keys.index(key)}",
                 [*map(_profile_row, MODELS[key].profiles), "{0}"]) for key in keys),
        _table("const struct gpu", "GPUS",
               [_gpu_row(gpu, keys.index(gpu.key)) for gpu in scenario.gpus]),
        _table("const struct instance", "INSTANCES", [
            _row(f"&GPUS[{gpu.index}]",
                 f"&PROFILES_{keys.index(gpu.key)}[{gpu.model.profiles.index(instance.profile)}]",
                 instance.id, instance.start, access_minor(gpu.minor, instance.id))
            for gpu, instance in instances
        ]),
        _table("const struct mig", "MIG", rows),
    ]  # fmt: skip
    texts = {
        "DRIVER_VERSION": driver,
        # NVML's own version: the newest CUDA major of its time, and the driver's version.
        "NVML_VERSION": f"{major}.{driver}",
    }
    counts = {
        "GPU_COUNT": len(scenario.gpus),
        "INSTANCE_COUNT": len(instances),
        "MIG_COUNT": len(rows),
    }
    return "".join([
        '#include "nvml.h"\n',
        *(f"const char {name}[{_LONGEST}] = {_quoted(name)};\n" for name in _PLACES),
        *(f"const char {name}[] = {_quoted(text)};\n" for name, text in texts.items()),
        f"const int CUDA_VERSION = {major * 1000 + minor * 10};\n",
        *(f"const u32 {name} = {count};\n" for name, count in counts.items()),
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
        profile.copy_engines, profile.decoders, profile.jpeg, profile.ofa, profile.first_id,
        profile.memory,
    )  # fmt: skip
    return row.removesuffix("}") + f", {{{starts}}}}}"


def _row(*values: str | int) -> str:
    """Return a C initialiser; text that starts with "&" is an address, other text is quoted."""
    return "{" + ", ".join(
        str(value) if isinstance(value, int) or value.startswith("&") else _quoted(value)
        for value in values
    ) + "}"  # fmt: skip


def _table(kind: str, name: str, rows: Sequence[str]) -> str:
    # A C array needs at least one element; the counts say how many are valid.
    body = ",\n    ".join(rows or ["{0}"])
    return f"{kind} {name}[] = {{\n    {body}\n}};\n"


@functools.cache
def _quoted(text: str) -> str:
    escaped = "".join(
        chr(byte)
        if chr(byte).isascii() and (chr(byte).isalnum() or byte in b" ._-/:+")
        else f"\\{byte:03o}"
        for byte in os.fsencode(text)
    )
    return f'"{escaped}"'


def _link(target: str, soname: str, *arguments: str) -> None:
    shared = ("-shared", f"-Wl,-soname,{soname}", "-Wl,--build-id=none")
    _gcc(target, *shared, *arguments, what=os.path.basename(target))


def _gcc(target: str, *arguments: str, what: str) -> None:
    done = _run(["gcc", *arguments, "-o", target])
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise LibraryNotBuilt(
            f"to compile {what}",
            found=(errors or done.stderr.splitlines() or ["no error message"])[0],
            do="install the packages gcc and libc6-dev",
        )


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _run(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    try:
        return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise LibraryNotBuilt(
            f"to run {argv[0]}",
            found="it is not installed",
            do="install the packages gcc and libc6-dev",
        ) from error
