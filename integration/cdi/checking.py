"""Find faults in spec files, and the host files they name that no longer exist.

=========  ========  ===================================================================
finding    weight    meaning
=========  ========  ===================================================================
invalid    error     it violates the specification, so no runtime uses it; or users other
                     than root may write it, so our shim does not use it
missing    error     a file or device node that it names is not on the host: the driver
                     was updated or removed after the spec was written
changed    error     a device node is another device, or not a device
conflict   error     another file in the same directory has the same device, so that no
                     container gets it
hook       warning   the program of a hook does not exist; our shim replaces some programs
                     of NVIDIA's, other runtimes need them
hidden     warning   a file in a later directory has the same device, and wins
=========  ========  ===================================================================

A runtime makes a node that the spec describes fully (type and numbers) without looking at the
host. If it is missing there, the spec is still that of another driver.

Source: CDI specification, "OCI Edits" and "Error Handling"; the rules of
:mod:`hooks.cdi.applying`, which finds the same when a container is created.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from hooks.cdi import files, schema
from hooks.cdi.applying import MOUNT_KINDS
from hooks.cdi.errors import CdiFileUnusable, CdiSpecInvalid
from hooks.cdi.registry import Registry
from hooks.cdi.spec import DeviceNode, Edits, SpecFile, SpecMount
from hooks.config import Config
from hooks.node.roots import DRIVER_CONTAINER
from integration.cdi.listing import CONFLICT, HIDDEN, list_devices

ERROR: Final = "error"
WARNING: Final = "warning"
_MEMORY: Final = MOUNT_KINDS - {"bind"}
_KINDS: Final = {stat.S_IFCHR: "c", stat.S_IFBLK: "b", stat.S_IFIFO: "p"}


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault."""

    what: str  # a finding of the table above
    weight: str  # ERROR or WARNING
    device: str  # the full name of the device; "" for all devices of the file
    subject: str  # the path, or the device
    found: str  # the message


@dataclass(slots=True)
class Checked:
    """A spec file, and its faults."""

    path: str
    kind: str = ""
    version: str = ""
    devices: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether there are only warnings."""
        return all(finding.weight != ERROR for finding in self.findings)


def check_files(paths: Iterable[str], config: Config) -> list[Checked]:
    """Check spec files one by one.

    Returns:
        A result for each path, in order.
    """
    return [_of_file(path, config) for path in paths]


def check_registry(registry: Registry, config: Config) -> list[Checked]:
    """Check all spec files of a node, and find conflicts between them.

    Returns:
        A result for each file, and for each directory that cannot be read, sorted by path.
    """
    checked = {file.path: _of(file.path, file.spec, config) for file in registry.files}
    for fault in registry.faults:
        checked[fault.path] = _unusable(fault.path, fault.error.found)
    rows = list_devices(registry)
    for row in rows:
        others = [each["file"] for each in rows if each["name"] == row["name"] and each != row]
        if row["state"] == CONFLICT:
            found = f"{_and(others)} has it, too: no container gets it"
            checked[row["file"]].findings.append(
                Finding(CONFLICT, ERROR, row["name"], row["name"], found)
            )
        elif row["state"] == HIDDEN:
            found = f"{others[0]} has it, too, and wins"
            checked[row["file"]].findings.append(
                Finding(HIDDEN, WARNING, row["name"], row["name"], found)
            )
    return [checked[path] for path in sorted(checked)]


def check_spec(spec: SpecFile, config: Config) -> list[Finding]:
    """Find the host files that a spec names and that do not exist.

    Returns:
        Findings in the order of the spec, each subject once.
    """
    found: dict[tuple[str, str], Finding] = {}
    for whose, edits in _edits_of(spec):
        for finding in _of_edits(edits, whose, config):
            found.setdefault((finding.what, finding.subject), finding)
    return list(found.values())


def _of_file(path: str, config: Config) -> Checked:
    try:
        content = files.read(path)
        if content is None:
            return _unusable(path, "no such file")
        spec = schema.parse(files.tree_of(content.data, path), path)
    except (CdiFileUnusable, CdiSpecInvalid) as error:
        return _unusable(path, error.found)
    return _of(path, spec, config)


def _unusable(path: str, found: str) -> Checked:
    return Checked(path, findings=[Finding("invalid", ERROR, "", path, found)])


def _of(path: str, spec: SpecFile, config: Config) -> Checked:
    return Checked(path, spec.kind, spec.version, len(spec.devices), check_spec(spec, config))


def _edits_of(spec: SpecFile) -> Iterator[tuple[str, Edits]]:
    yield "", spec.edits
    for device in spec.devices:
        yield f"{spec.kind}={device.name}", device.edits


def _of_edits(edits: Edits, whose: str, config: Config) -> Iterator[Finding]:
    for node in edits.device_nodes:
        finding = _of_node(node, whose, config)
        if finding is not None:
            yield finding
    for mount in edits.mounts:
        source = mount.host_path
        if _is_of_host(mount) and not os.path.exists(source):
            yield Finding("missing", ERROR, whose, source, "no such file or directory")
    for hook in edits.hooks:
        # The program of a startContainer hook is in the container.
        if hook.name != "startContainer" and not os.access(hook.path, os.X_OK):
            yield Finding(
                "hook", WARNING, whose, hook.path, f"the {hook.name} hook is not an executable file"
            )


def _is_of_host(mount: SpecMount) -> bool:
    return mount.kind not in _MEMORY or bool({"bind", "rbind"}.intersection(mount.options))


def _of_node(node: DeviceNode, whose: str, config: Config) -> Finding | None:
    path = node.host_path or node.path
    seen = next(filter(None, map(_look, _places(path, config))), None)
    if seen is None:
        return Finding("missing", ERROR, whose, path, "no such device node")
    kind = _KINDS.get(stat.S_IFMT(seen.st_mode))
    if kind is None:
        return Finding("changed", ERROR, whose, path, "it is not a device node")
    wanted = "c" if node.kind == "u" else node.kind
    numbers = f"{os.major(seen.st_rdev)}:{os.minor(seen.st_rdev)}"
    if wanted and wanted != kind:
        return Finding("changed", ERROR, whose, path, f"its type is {kind}, not {wanted}")
    if kind != "p" and node.major and numbers != f"{node.major}:{node.minor}":
        said = f"it is device {numbers}, not {node.major}:{node.minor}"
        return Finding("changed", ERROR, whose, path, said)
    return None


def _places(path: str, config: Config) -> Iterator[str]:
    """Yield where a node of the host's /dev may be: there, or in a driver container's /dev."""
    below = posixpath.normpath(path).removeprefix("/dev/")
    if below.startswith("/"):
        yield path
        return
    yield f"{config.dev}/{below}"
    yield f"{config.driver_root or DRIVER_CONTAINER}/dev/{below}"


def _look(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def _and(words: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(words))
