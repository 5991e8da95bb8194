"""Read the configuration of Docker and CRI-O, and find other components that inject GPUs.

Only the keys named here are kept, because daemon.json may contain addresses and secrets.

Source: Docker's reference of daemon.json; crio.conf(5); oci-hooks(5); NVIDIA's toolkit,
cmd/nvidia-ctk-installer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final

from api.errors import one_line
from integration import tomltext
from integration.containers.node_processes import host_processes, node_processes
from integration.doctor.facts import Crio, Docker, DockerRuntime, Injector
from integration.doctor.observing.running import find_program, read_file
from integration.doctor.places import Places
from integration.engines import jsontext
from integration.json_documents import parse_json

_DAEMON_JSON: Final = "/etc/docker/daemon.json"
_HOOK: Final = "nvidia-container-runtime-hook"
_CRIO: Final = ("/etc/crio/crio.conf", "/etc/crio/crio.conf.d")
_HOOK_DIRECTORIES: Final = ("/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d")
# The process names of NVIDIA's installer.
_INSTALLERS: Final = ("nvidia-ctk-installer", "nvidia-toolkit")
_COMM: Final = 15  # the kernel's limit of a process name


def look_at_docker(places: Places) -> Docker | None:
    """Return Docker's configuration; None without Docker."""
    path = places.at(_DAEMON_JSON)
    program = find_program(places, "dockerd")
    runs = any(process.name == "dockerd" for process in host_processes(places.at("/proc")))
    if not (program or runs or os.path.exists(path)):
        return None
    table: Any = {}
    fault = ""
    if os.path.exists(path):
        try:
            # To dockerd an empty file is one without settings, and so is null.
            text = read_file(path).removeprefix(jsontext.MARK).strip()
            table = {} if text in {"", "null"} else parse_json(text)
        except ValueError as error:
            fault = f"not valid JSON: {one_line(str(error))}"
        if not isinstance(table, dict):
            table, fault = {}, "not a JSON object"
    runtimes = _table(table.get("runtimes"))
    cdi = _table(table.get("features")).get("cdi")
    return Docker(
        path=_DAEMON_JSON,
        fault=fault,
        runtimes=tuple(
            DockerRuntime(
                str(name),
                str(_table(runtime).get("runtimeType") or ""),
                str(_table(runtime).get("path") or ""),
            )
            for name, runtime in runtimes.items()
        ),
        default_runtime=str(table.get("default-runtime") or ""),
        cdi=cdi if isinstance(cdi, bool) else None,
        runs=runs,
        hook=find_program(places, _HOOK),
    )


def look_at_crio(places: Places) -> Crio | None:
    """Return CRI-O's handlers; None without CRI-O."""
    main, drop_ins = _CRIO
    here = places.at(drop_ins)
    paths = [main, *(os.path.join(drop_ins, name) for name in _names(here))]
    files = [path for path in paths if os.path.isfile(places.at(path))]
    if not files and not find_program(places, "crio"):
        return None
    handlers: dict[str, str] = {}
    faults = []
    for file in files:
        try:
            table = tomltext.parse(read_file(places.at(file)))
        except (ValueError, OSError) as error:
            faults.append(f"{file}: {one_line(str(error))}")
            continue
        runtimes = _table(_table(_table(table.get("crio")).get("runtime")).get("runtimes"))
        for name, runtime in runtimes.items():
            handlers[str(name)] = str(_table(runtime).get("runtime_path") or "")
    return Crio(tuple(files), tuple(handlers.items()), tuple(faults))


def look_at_injectors(places: Places) -> tuple[Injector, ...]:
    """Return other components that add GPUs to containers, except handlers and runtimes."""
    return tuple(_injectors(places))


def _injectors(places: Places) -> Iterator[Injector]:
    for directory in _HOOK_DIRECTORIES:
        for name in _names(places.at(directory)):
            path = os.path.join(directory, name)
            if name.endswith(".json") and "nvidia" in read_file(places.at(path)).lower():
                yield Injector("OCI hook", path)
    for process in node_processes(places.at("/proc")):
        if process.name not in {name[:_COMM] for name in _INSTALLERS}:
            continue
        nri = any("nri" in word for word in process.words[1:] if word.startswith("-"))
        kind = "NRI plugin of NVIDIA's toolkit" if nri else "NVIDIA's toolkit container"
        yield Injector(kind, f"process {process.pid}")


def _names(directory: str) -> list[str]:
    return sorted(n for n in os.listdir(directory)) if os.path.isdir(directory) else []


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
