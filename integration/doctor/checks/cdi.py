"""CDI specs: D060 to D066."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from integration.doctor.findings import ERROR, WARNING, Trouble, check, listed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.doctor.facts import Cdi, CdiFile, Containerd, Docker, Driver

_GPU: Final = "nvidia.com/gpu"
_GENERATE: Final = "nvshim cdi generate -f /var/run/cdi/nvidia.yaml"
_SPECIFICATION: Final = "https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md"


@check(
    "NVSHIM-D060",
    ERROR,
    "a CDI spec cannot be used",
    why="Its devices are unknown to whoever asks for them.",
    remedy="have the vendor's program write it anew, as root and for root alone to write",
    reference=_SPECIFICATION,
)
def _unusable(cdi: Cdi) -> Iterator[Trouble]:
    for file in cdi.files:
        if file.fault:
            yield Trouble(f"{file.path}: {file.fault}")


@check(
    "NVSHIM-D061",
    ERROR,
    "a CDI spec names files that are gone",
    why=(
        "A container with one of its devices does not start. It is the mark of a spec of "
        "before an update of the driver."
    ),
    remedy="write the spec anew",
    command=_GENERATE,
    reference="https://github.com/NVIDIA/nvidia-container-toolkit/issues/856",
)
def _gone(cdi: Cdi) -> Iterator[Trouble]:
    for file in cdi.files:
        if file.gone:
            yield Trouble(f"{file.path} ({file.kind}) names {listed(file.gone)}")


@check(
    "NVSHIM-D062",
    ERROR,
    "a CDI spec names device nodes that are others now",
    why="A container is given a device that does not answer, or another one.",
    remedy="make the nodes, then write the spec anew",
    command=f"nvshim devices create && {_GENERATE}",
)
def _nodes(cdi: Cdi) -> Iterator[Trouble]:
    for file in cdi.files:
        if file.wrong_nodes:
            yield Trouble(f"{file.path} ({file.kind}) names {listed(file.wrong_nodes)}")


@check(
    "NVSHIM-D063",
    ERROR,
    "a CDI spec is of another driver",
    why="Its libraries do not work with the loaded kernel module.",
    remedy="write the spec anew",
    command=_GENERATE,
)
def _driver(cdi: Cdi, driver: Driver) -> Iterator[Trouble]:
    if not driver.version:
        return
    for file in cdi.files:
        others = [version for version in file.drivers if version != driver.version]
        if others:
            yield Trouble(f"{file.path} is of driver {listed(others)}, this is {driver.version}")


@check(
    "NVSHIM-D064",
    ERROR,
    "several CDI specs have the same device",
    why=(
        "In one directory, nobody gets it. In two, the later directory decides for us and for "
        "some engines; others refuse the device."
    ),
    remedy="remove all but one of the files",
    reference=_SPECIFICATION,
)
def _conflicts(cdi: Cdi) -> Iterator[Trouble]:
    having: dict[str, list[CdiFile]] = {}
    for file in cdi.files:
        for device in dict.fromkeys(file.devices):
            having.setdefault(f"{file.kind}={device}", []).append(file)
    # One line for each set of files: they differ in many devices, or in none.
    sets: dict[tuple[str, ...], tuple[list[str], bool]] = {}
    for name, files in having.items():
        if len(files) < 2:  # noqa: PLR2004 - two are needed for a conflict
            continue
        highest = max(file.priority for file in files)
        decided = sum(file.priority == highest for file in files) == 1
        names, _ = sets.setdefault(tuple(file.path for file in files), ([], decided))
        names.append(name)
    for paths, (names, decided) in sets.items():
        if decided:
            yield Trouble(
                f"{listed(names)}: in {listed(paths)}; the last decides for us",
                severity=WARNING,
            )
        else:
            yield Trouble(f"{listed(names)}: in {listed(paths)}; nobody gets them")


@check(
    "NVSHIM-D065",
    WARNING,
    "GPUs are in no CDI spec",
    why=(
        "Engines that inject by CDI do not know them: /var/run/cdi is empty after a boot until "
        "somebody writes into it. Our shim knows them without a spec."
    ),
    remedy="write the spec, and have it written at boot",
    command=_GENERATE,
)
def _incomplete(
    driver: Driver, cdi: Cdi, containerd: Containerd | None = None, docker: Docker | None = None
) -> Iterator[Trouble]:
    readers = []
    if containerd is not None and containerd.enable_cdi:
        readers.append("containerd")
    if docker is not None and docker.cdi:
        readers.append("Docker")
    if not readers or not driver.gpus:
        return
    known = {d for file in cdi.files if file.kind == _GPU for d in file.devices}
    missing = [
        gpu.uuid
        for gpu in driver.gpus
        # A GPU that has been divided is in a spec by its instances.
        if gpu.uuid not in known
        and str(gpu.index) not in known
        and not any(name.startswith(f"{gpu.index}:") for name in known)
    ]
    if missing:
        yield Trouble(f"{listed(readers)} reads CDI specs; {listed(missing)} is in none")


@check(
    "NVSHIM-D066",
    WARNING,
    "a CDI spec has GPUs that are gone",
    why="Who is given one of them gets nothing, or a container that does not start.",
    remedy="write the spec anew",
    command=_GENERATE,
)
def _stale_devices(cdi: Cdi, driver: Driver) -> Iterator[Trouble]:
    present = {gpu.uuid.lower() for gpu in driver.gpus}
    if not present:
        return
    for file in cdi.files:
        if file.kind != _GPU:
            continue
        uuids = [name for name in file.devices if name.lower().startswith("gpu-")]
        gone = [name for name in uuids if name.lower() not in present]
        if gone:
            yield Trouble(f"{file.path} has {listed(gone)}, which this node has not")
