"""Read containerd's configuration: its files, and the merged result.

The merged configuration comes from ``containerd config dump``. If that fails, the files are merged
as containerd does: a table of an imported file replaces the root file's, handler by handler.

Source: containerd-config.toml(5), docs/cri/config.md; cmd/containerd/server/config; for k3s and
rke2 their pkg/agent/templates.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from api.errors import one_line
from integration import tomltext
from integration.containers.node_processes import Process, host_processes
from integration.doctor.facts import ConfigFile, Containerd, CouldNotLook, Handler, ProgramFailed
from integration.doctor.observing.running import (
    SYSTEM_PATH,
    find_program,
    read_file,
    run,
)
from integration.doctor.places import Places
from integration.engines.imports import K0S, is_k0s_managed
from integration.handlers import RUNC_TYPE, calls_our_shim
from shim import PROGRAM, RUNTIME_NAME
from shim.runtime.options import KNOWN_KEYS, RUNC_KEYS

_DEFAULT: Final = "/etc/containerd/config.toml"
# The root file's directory of each distribution that generates it, and the templates it uses.
_DISTRIBUTIONS: Final = {
    "k3s": "/var/lib/rancher/k3s/agent/etc/containerd",
    "rke2": "/var/lib/rancher/rke2/agent/etc/containerd",
    "k0s": "/etc/k0s",
    "microk8s": "/var/snap/microk8s/current/args",
}
_TEMPLATES: Final = {
    "k3s": ("config-v3.toml.tmpl", "config.toml.tmpl", "config-v3.toml.d", "config.toml.d"),
    "rke2": ("config-v3.toml.tmpl", "config.toml.tmpl", "config-v3.toml.d", "config.toml.d"),
    "k0s": ("containerd.d",),
    "microk8s": ("containerd-template.toml",),
}
_NAMES: Final = {"k0s": "containerd.toml", "microk8s": "containerd.toml"}
# Directories of drop-ins: containerd's, and a common mistake.
_DROP_INS: Final = ("conf.d", "config.d")
# The plugin with the handlers, in formats 3 and 4, in 2, and in 1.
_CRI: Final = ("io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri", "cri")
_OF_CRI: Final = ("io.containerd.cri.v1.images",)
_MOST_FILES: Final = 64
_VERSION: Final = re.compile(
    r"^containerd \S+ v?(\d+\.\d+\.\d+(?:[-~](?:alpha|beta|rc)\b[.\d]*)?)", re.ASCII
)
# CDI is enabled by default since 2.0.
_WITH_CDI: Final = tuple(f"{major}." for major in range(2, 10))
_SHIM_DIRECTORIES: Final = SYSTEM_PATH


def look_at_containerd(places: Places) -> Containerd | None:
    """Return containerd's configuration; None if neither program nor configuration exists."""
    process, path, distribution = _find(places)
    program = _program(places, process)
    exists = os.path.exists(places.at(path))
    if not program and not exists:
        return None
    files, merged = _read_files(places, path)
    dump_fault = ""
    if program and exists:
        try:
            words = [program, "--config", path, "config", "dump"]
            merged = tomltext.parse(run(places, words, in_root=True))
        except ProgramFailed as error:
            dump_fault = str(error)
        except CouldNotLook:
            pass  # use the files
        except ValueError as error:
            dump_fault = f"its output is not valid TOML: {one_line(str(error))}"
    cri, version = _cri(merged), _version(places, program)
    runtimes = _table(_table(cri, "containerd"), "runtimes")
    search_path = (process.search_path() if process else ()) or _SHIM_DIRECTORIES
    return Containerd(
        path=path,
        exists=exists,
        distribution=distribution,
        template=_template(places, path, distribution),
        pid=process.pid if process else 0,
        newer=tuple(_newer(places, process, files)),
        descriptors=_descriptors(process),
        search_path=search_path,
        files=files,
        dump_fault=dump_fault,
        handlers=tuple(
            _handler(places, name, table, search_path) for name, table in runtimes.items()
        ),
        default_handler=str(_table(cri, "containerd").get("default_runtime_name") or ""),
        cri=not {str(name) for name in merged.get("disabled_plugins") or ()} & {*_CRI, *_OF_CRI},
        enable_cdi=cri.get("enable_cdi", version.startswith(_WITH_CDI)) is True,
        cdi_dirs=tuple(str(d) for d in cri.get("cdi_spec_dirs") or ()),
        state=str(merged.get("state") or "/run/containerd"),
        root=str(merged.get("root") or "/var/lib/containerd"),
        version=version,
        by_name=find_program(places, PROGRAM, search_path),
    )


def _find(places: Places) -> tuple[Process | None, str, str]:
    """Return the process, its root file, and the distribution that generates that file."""
    running: dict[str, Process] = {}
    for process in host_processes(places.at("/proc")):
        if process.name == "containerd":
            running.setdefault(process.option("--config", "-c") or _DEFAULT, process)
    if places.containerd_config:
        path = places.containerd_config
    else:
        known = [
            os.path.join(directory, _NAMES.get(name, "config.toml"))
            for name, directory in _DISTRIBUTIONS.items()
        ]
        there = (p for p in (_DEFAULT, *known) if os.path.exists(places.at(p)))
        path = _DEFAULT if _DEFAULT in running else next(iter(running), next(there, _DEFAULT))
    of = next((name for name, d in _DISTRIBUTIONS.items() if path.startswith(f"{d}/")), "")
    if of == K0S and not _is_k0s_managed(places, path):
        of = ""  # the user manages the file
    return running.get(path), path, of


def _is_k0s_managed(places: Places, path: str) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return is_k0s_managed(read_file(places.at(path)))
    return False


def _program(places: Places, process: Process | None) -> str:
    if process is not None:
        program = process.procfs.program(process.pid)
        if program and os.path.exists(places.at(program)):
            return program
    return find_program(places, "containerd")


def _version(places: Places, program: str) -> str:
    if program:
        with contextlib.suppress(CouldNotLook):
            # A multi-call program (k3s) prints its own version, which does not match.
            if found := _VERSION.search(run(places, [program, "--version"])):
                return found[1]
    return ""


def _template(places: Places, path: str, distribution: str) -> str:
    directory = os.path.dirname(path)
    for name in _TEMPLATES.get(distribution, ()):
        place = os.path.join(directory, name)
        is_directory = os.path.isdir(places.at(place))
        for file in _glob(places, f"{place}/*") if is_directory else [place]:
            with contextlib.suppress(OSError):
                text = read_file(places.at(file))
                if RUNTIME_NAME in text or PROGRAM in text:
                    return os.path.join(directory, name)
    return ""


def _read_files(places: Places, path: str) -> tuple[tuple[ConfigFile, ...], dict[str, Any]]:
    """Return the files, and their merged content."""
    files: list[ConfigFile] = []
    merged: dict[str, Any] = {}
    waiting, known = [(path, True)], {path}
    if not os.path.exists(places.at(path)):
        return (), merged
    directory = os.path.dirname(path)
    while waiting and len(files) < _MOST_FILES:
        file, imported = waiting.pop(0)
        table, fault = _parsed(places, file)
        handlers = _table(_table(_cri(table), "containerd"), "runtimes")
        version = table.get("version", 1)
        files.append(
            ConfigFile(
                path=file,
                version=version if isinstance(version, int) else 0,
                handlers=tuple(
                    (name, calls_our_shim(table.get("runtime_type"), table.get("runtime_path")))
                    for name, table in ((n, _as_table(h)) for n, h in handlers.items())
                ),
                imported=imported,
                root=file == path,
                fault=fault,
            )
        )
        if imported:
            merged = _merge(merged, table)
            found = [(f, True) for f in _imports(places, file, table)]
        else:
            found = []
        if file == path:
            found += [
                (f, False)
                for name in _DROP_INS
                for f in _glob(places, os.path.join(directory, name, "*.toml"))
            ]
        for each, is_imported in found:
            if each not in known:
                known.add(each)
                waiting.append((each, is_imported))
    return tuple(files), merged


def _parsed(places: Places, path: str) -> tuple[dict[str, Any], str]:
    try:
        return tomltext.parse(read_file(places.at(path))), ""
    except OSError as error:
        return {}, str(error.strerror)
    except ValueError as error:
        return {}, f"not valid TOML: {one_line(str(error))}"


def _imports(places: Places, file: str, table: Mapping[str, Any]) -> Iterator[str]:
    patterns = table.get("imports")
    for pattern in patterns if isinstance(patterns, list) else ():
        if isinstance(pattern, str):
            yield from _glob(places, os.path.join(os.path.dirname(file), pattern))


def _glob(places: Places, pattern: str) -> list[str]:
    directory, name = os.path.split(pattern)
    found = []
    for each in _glob(places, directory) if "*" in directory else [directory]:
        here = os.path.join(glob.escape(places.at(each)), name)
        found += [os.path.join(each, os.path.basename(path)) for path in glob.glob(here)]
    return sorted(found)


def _merge(one: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(one)
    for key, value in other.items():
        before = merged.get(key)
        both = isinstance(before, dict) and isinstance(value, dict)
        merged[key] = _merge(before, value) if both else value  # type: ignore[arg-type]
    return merged


def _as_table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _table(table: Mapping[str, Any], key: str) -> dict[str, Any]:
    return _as_table(table.get(key))


def _cri(table: Mapping[str, Any]) -> dict[str, Any]:
    plugins = _table(table, "plugins")
    # The merged configuration of 2.x has the first two plugins; the handlers are in the first.
    having = [plugin for name in _CRI if (plugin := _table(plugins, name))]
    return next((p for p in having if "containerd" in p), having[0] if having else {})


def _handler(places: Places, name: str, table: Any, search_path: tuple[str, ...]) -> Handler:
    table = _as_table(table)
    kind, path = str(table.get("runtime_type") or ""), str(table.get("runtime_path") or "")
    options = _table(table, "options")
    binary = str(options.get("BinaryName") or "")
    systemd = options.get("SystemdCgroup")
    unknown: Iterable[str] = ()
    if calls_our_shim(kind, path):
        # containerd itself parses the options of a handler of runc's type, as runc's options.
        keys = RUNC_KEYS if kind == RUNC_TYPE else KNOWN_KEYS
        known = {key.lower() for key in keys}
        unknown = [key for key in options if key.lower() not in known]
    return Handler(
        name=name,
        runtime_type=kind,
        runtime_path=path,
        shim=find_program(places, path or _shim_of(kind), search_path) if path or kind else "",
        binary_name=binary,
        binary=find_program(places, binary, search_path) if binary else "",
        systemd_cgroup=systemd if isinstance(systemd, bool) else None,
        unknown_options=tuple(unknown),
        annotations=tuple(map(str, _list(table.get("container_annotations")))),
        sandboxer=str(table.get("sandboxer") or ""),
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _shim_of(kind: str) -> str:
    """Return a runtime type's program: containerd-shim-runc-v2 for io.containerd.runc.v2."""
    if kind.startswith("/"):
        return kind
    return "-".join(["containerd-shim", *kind.split(".")[-2:]])


def _newer(places: Places, process: Process | None, files: Iterable[ConfigFile]) -> Iterator[str]:
    status = None if process is None else process.procfs.status(process.pid)
    if status is None:
        return
    for file in files:
        with contextlib.suppress(OSError):
            # Allow a second, because the boot time has no finer resolution.
            if file.imported and os.stat(places.at(file.path)).st_mtime > status.started + 1:
                yield file.path


def _descriptors(process: Process | None) -> int | None:
    return None if process is None else process.procfs.open_files_limit(process.pid)
