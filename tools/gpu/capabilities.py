"""Checks of each capability alone: its own libraries load, and other capabilities' are missing.

The engine's table lists the files of each capability, and the inventory lists this driver's files.
A library that needs one which only images provide (X11, Wayland) is reported separately from one
that does not work.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from hooks.node.capabilities import Library, rows_of
from hooks.node.driver import LibraryFile
from hooks.words import Capability
from tools.gpu.checks import SIMULATED, Subject, answers, lists, refusal, told
from tools.gpu.containers import Container, asking
from tools.gpu.report import Report, failed, not_possible

_ALONE: Final = (
    Capability.UTILITY,
    Capability.COMPUTE,
    Capability.VIDEO,
    Capability.GRAPHICS,
    Capability.DISPLAY,
    Capability.NGX,
)
_NVIDIA: Final = 0x10DE
_NOT_THERE: Final = re.compile(r"(\S+): cannot open shared object file")


def check_capabilities(subject: Subject, report: Report) -> None:
    """Check a container of each capability alone."""
    for capability in _ALONE:
        name = f"`{capability}` alone"
        try:
            with subject.containers.started(flags=asking(subject.one, capability)) as container:
                inside = _Inside(subject, container, capability)
                for what, look in inside.looks():
                    report.check(f"{name}: {what}", look)
        except Exception as error:  # noqa: BLE001 - the start failed; check the other capabilities
            report.check(f"{name}: a container starts", lambda error=error: _raise(error))  # type: ignore[misc]
    report.check("`compat32` brings the 32-bit libraries", lambda: _compat32(subject))


@dataclass(frozen=True, slots=True)
class _Inside:
    subject: Subject
    container: Container
    capability: str

    def looks(self) -> Iterator[tuple[str, Any]]:
        """Yield the checks, by name."""
        yield "its libraries load", self.own_libraries
        yield "libraries of other capabilities are missing", self.other_libraries
        match self.capability:
            case Capability.UTILITY:
                yield "nvidia-smi -L lists the GPU", self.lists
                yield "there is no CUDA", self.no_cuda
            case Capability.COMPUTE:
                yield "CUDA computes", self.computes
                yield "there is no nvidia-smi", self.no_smi
            case Capability.VIDEO:
                yield "CUDA computes", self.computes
                yield "the encoder answers", self.encodes
                yield "the GPU decodes H.264", self.decodes
            case Capability.GRAPHICS | Capability.DISPLAY:
                yield "EGL has NVIDIA's devices", self.egl
                yield "Vulkan has NVIDIA's devices", self.vulkan

    def own_libraries(self) -> str:
        libraries = list(self._libraries(own=True))
        if not libraries:
            raise not_possible("this driver has none of them")
        loaded, wanting, broken = 0, set(), []
        for name, reason in self._load(libraries).items():
            missing = _NOT_THERE.match(reason)
            if not reason:
                loaded += 1
            elif missing and missing[1] not in self._names_of_driver():
                wanting.add(missing[1])
            else:
                broken.append(f"{name}: {reason}")
        if broken:
            raise failed(f"{loaded} load; {'; '.join(broken)}")
        rest = f"; others need {', '.join(sorted(wanting))} from an image" if wanting else ""
        return f"{loaded} of {len(libraries)}{rest}"

    def other_libraries(self) -> str:
        libraries = list(self._libraries(own=False))
        there = [
            name
            for name, reason in self._load(libraries).items()
            if not reason.startswith(f"{name}: cannot open shared object file")
        ]
        if there:
            raise failed(f"there are {', '.join(there)}")
        return f"none of {len(libraries)}"

    def lists(self) -> str:
        expected = [gpu.uuid for gpu in self.subject.gpus[:1]] or self.subject.uuids
        return lists(self.container.exec("nvidia-smi", "-L"), expected)

    def no_cuda(self) -> str:
        last = answers(self.container.exec("gpu", "cuda"))[-1]
        if last.get("failed") != "dlopen libcuda.so.1":
            raise failed(str(last))
        return refusal(last)

    def no_smi(self) -> str:
        done = self.container.exec("sh", "-c", "command -v nvidia-smi")
        if done.code == 0:
            raise failed(f"there is {done.stdout}")
        return "none on PATH"

    def computes(self) -> str:
        expected = [gpu.uuid for gpu in self.subject.gpus[:1]] or self.subject.uuids
        return self.subject.computes(self.container.exec("gpu", "cuda"), expected)

    def encodes(self) -> str:
        if not self._has("libnvidia-encode.so.{v}"):
            raise not_possible("this driver has no libnvidia-encode")
        last = self._answers("encode")[-1]
        return f"NvEncodeAPI {last['interface']}"

    def decodes(self) -> str:
        if not self._has("libnvcuvid.so.{v}"):
            raise not_possible("this driver has no libnvcuvid")
        last = self._answers("decode")[-1]
        if not last["h264"]:
            raise not_possible("this GPU decodes no H.264")
        return f"up to {last['width']} by {last['height']}"

    def egl(self) -> str:
        if not self._has("libEGL_nvidia.so.{v}"):
            raise not_possible("this driver has no libEGL_nvidia")
        found = [line for line in self._answers("egl")[1:] if "NVIDIA" in line["vendor"]]
        if not found:
            raise failed("EGL has no device of NVIDIA's that can be initialised")
        return f"{len(found)}: {found[0]['version']}"

    def vulkan(self) -> str:
        if not self._has("libGLX_nvidia.so.{v}"):
            raise not_possible("this driver has no libGLX_nvidia")
        found = [line for line in self._answers("vulkan")[1:] if line["vendor"] == _NVIDIA]
        if not found:
            raise failed("Vulkan has no device of NVIDIA's")
        return f"{len(found)}: {found[0]['name']}, Vulkan {found[0]['api']}"

    def _answers(self, command: str) -> list[dict[str, Any]]:
        done = self.container.exec("gpu", command)
        if self.subject.simulated and done.code != 0 and '"failed": "dl' not in done.stdout:
            raise not_possible(f"{SIMULATED}: {told(done)}")
        lines = answers(done)
        if "failed" in lines[-1]:
            raise failed(refusal(lines[-1]))
        if self.subject.simulated and len(lines) == 1 and "count" in lines[0]:
            raise not_possible(f"{SIMULATED}: no device")
        return lines

    def _has(self, row: str) -> bool:
        return any(library.row == row for library in self._libraries_of_driver())

    def _libraries_of_driver(self) -> Iterator[LibraryFile]:
        driver = self.subject.inventory.driver
        return (library for library in driver.libraries if library.arch is driver.arch)

    def _names_of_driver(self) -> set[str]:
        every = self._libraries_of_driver()
        return {name for library in every for name in (library.name, library.soname or "")}

    def _libraries(self, *, own: bool) -> Iterator[str]:
        rows = {row.name for row in rows_of({self.capability}) if isinstance(row, Library)}
        for library in self._libraries_of_driver():
            if (library.row in rows) is own:
                yield library.soname or library.name

    def _load(self, names: Iterable[str]) -> dict[str, str]:
        """Return why each library does not load; "" if it does.

        Each loads in a separate process: a crash must not hide the others, and a library must not
        depend on another one that happens to be loaded.
        """
        wanted = list(dict.fromkeys(names))
        if not wanted:
            return {}
        script = 'for n; do probe dlopen "$n" || [ $? -eq 1 ] || echo "$n - crashed: $?"; done'
        done = self.container.exec("sh", "-c", script, "sh", *wanted)
        found = {}
        for line in done.lines:
            name, _, rest = line.partition(" ")
            found[name] = rest.removeprefix("- ") if rest.startswith("- ") else ""
        missing = [name for name in wanted if name not in found]
        if missing:
            raise failed(f"no answer about {', '.join(missing)}: {told(done)}")
        return found


def _compat32(subject: Subject) -> str:
    driver = subject.inventory.driver
    narrow = [library for library in driver.libraries if library.arch is driver.arch32]
    if not narrow:
        raise not_possible("this driver has no 32-bit libraries")
    flags = asking(subject.one, "compute,utility,compat32")
    with subject.containers.started(flags=flags) as container:
        sources = {library.source for library in narrow}
        mounts = [m for m in container.record["edits"]["mounts"] if m["source"] in sources]
        if not mounts:
            raise failed(f"none of {len(narrow)} is mounted")
        done = container.exec("ls", *(mount["destination"] for mount in mounts))
        if done.code != 0:
            raise failed(told(done))
    return f"{len(mounts)}, in {mounts[0]['destination'].rpartition('/')[0]}"


def _raise(error: Exception) -> str:
    raise error
