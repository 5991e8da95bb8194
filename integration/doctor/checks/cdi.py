"""CDI specs: D060 to D066."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from integration.doctor.facts import Cdi, CdiFile, Containerd, Docker, Driver
from integration.doctor.findings import WARNING, Trouble, check, listed

_GPU: Final = "nvidia.com/gpu"


@check("D060")
def _unusable(cdi: Cdi) -> Iterable[str]:
    return (f"{file.path}: {file.fault}" for file in cdi.files if file.fault)


@check("D061")
def _gone(cdi: Cdi) -> Iterable[str]:
    return (f"{f.path} ({f.kind}) names {listed(f.gone)}" for f in cdi.files if f.gone)


@check("D062")
def _nodes(cdi: Cdi) -> Iterable[str]:
    wrong = (f for f in cdi.files if f.wrong_nodes)
    return (f"{f.path} ({f.kind}) names {listed(f.wrong_nodes)}" for f in wrong)


@check("D063")
def _driver(cdi: Cdi, driver: Driver) -> Iterator[str]:
    if not driver.version:
        return
    for file in cdi.files:
        others = [version for version in file.drivers if version != driver.version]
        if others:
            yield f"{file.path} is for driver {listed(others)}; the node has {driver.version}"


@check("D064")
def _conflicts(cdi: Cdi) -> Iterator[str | Trouble]:
    having: dict[str, list[CdiFile]] = {}
    for file in cdi.files:
        for device in dict.fromkeys(file.devices):
            having.setdefault(f"{file.kind}={device}", []).append(file)
    # One line per set of files, which usually conflict in many devices.
    sets: dict[tuple[str, ...], tuple[list[str], bool]] = {}
    for name, files in having.items():
        if len(files) < 2:  # noqa: PLR2004 - a conflict needs two
            continue
        highest = max(file.priority for file in files)
        decided = sum(file.priority == highest for file in files) == 1
        names, _ = sets.setdefault(tuple(file.path for file in files), ([], decided))
        names.append(name)
    for paths, (names, decided) in sets.items():
        if decided:
            yield Trouble(
                f"{listed(names)}: in {listed(paths)}; the shim uses the last file",
                severity=WARNING,
            )
        else:
            yield f"{listed(names)}: in {listed(paths)}; they cannot be used"


@check("D065")
def _incomplete(
    driver: Driver, cdi: Cdi, containerd: Containerd | None = None, docker: Docker | None = None
) -> Iterator[str]:
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
        # A spec lists the instances of a GPU in MIG mode.
        if gpu.uuid not in known
        and str(gpu.index) not in known
        and not any(name.startswith(f"{gpu.index}:") for name in known)
    ]
    if missing:
        yield f"{listed(readers)} reads CDI specs; {listed(missing)} is in none of them"


@check("D066")
def _stale_devices(cdi: Cdi, driver: Driver) -> Iterator[str]:
    present = {gpu.uuid.lower() for gpu in driver.gpus}
    if not present:
        return
    for file in cdi.files:
        if file.kind != _GPU:
            continue
        uuids = [name for name in file.devices if name.lower().startswith("gpu-")]
        gone = [name for name in uuids if name.lower() not in present]
        if gone:
            yield f"{file.path} has {listed(gone)}, which this node does not have"
