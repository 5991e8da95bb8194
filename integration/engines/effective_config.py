"""Ask containerd what it reads from a configuration (``containerd config dump``) before writing it.

Rules
- containerd judges its own configuration. What it refuses or misreads is never written.
- containerd reads copies: we write every configuration file into a temporary directory and point
  the imports at the copies. This changes nothing on the node.
- Two dumps are compared value by value, except for the list of imports.

Source: containerd-config(8), cmd/containerd/command/config.go.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Final

from integration import tomltext
from integration.engines.errors import ConfigRefused
from integration.engines.imports import imports_value, load
from integration.engines.programs import find_program, run, temporary_directory, version_of
from integration.engines.running import running_program
from integration.engines.undo import View

# The plugin that holds the handlers, newest first.
CRI: Final = ("io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri")

CONTAINERD: Final = "containerd"
IMAGES: Final = "io.containerd.cri.v1.images"
"""The plugin that holds containerd 2's image settings."""


class Containerd:
    """The node's containerd program, which need not be running.

    Args:
        program: its path or name; by default the running one, or else containerd on the path of
            system services.
        socket: where a running one may listen; "" for none.

    Attributes:
        program: its path.
        version: "1.7.24~ds1".
        release: (1, 7).

    Raises:
        EngineNotInstalled: the program is not installed, or does not report its version.
        EngineElsewhere: another containerd runs, and its program was not found.
    """

    def __init__(self, program: str | None = None, socket: str = "") -> None:
        if program is None and socket:
            program = running_program(socket, CONTAINERD)
        self.program = find_program(program or CONTAINERD, "--containerd")
        self.version = version_of(self.program)
        major, minor = self.version.removeprefix("v").split(".")[:2]
        self.release = int(major), int(minor)

    def __str__(self) -> str:
        """Return version and path, for messages."""
        return f"containerd {self.version} ({self.program})"

    @property
    def merges(self) -> bool:
        """Whether this release merges an imported file's plugin table into the root file's.

        containerd 1.x replaces the table: the root file's settings of the plugin are lost.
        """
        return self.release >= (2, 0)

    @cached_property
    def relative_patterns(self) -> bool:
        """Whether a relative import pattern is relative to the directory of the importing file.

        Otherwise it is relative to containerd's working directory. The behaviour changed within 1.6
        and 1.7, and distributions backport fixes, so we try it out.
        """
        if self.merges:
            return True
        with temporary_directory() as directory:
            root = f"{directory}/config.toml"
            for path, text in (
                (root, 'version = 2\nimports = ["*.imported"]\n'),
                (f"{directory}/a.imported", "version = 2\noom_score = 1\n"),
            ):
                with open(path, "w", encoding="utf-8") as file:
                    file.write(text)
            done = run([self.program, "--config", root, "config", "dump"])
            return "oom_score = 1\n" in done.stdout

    def dump(self, view: View, root: str) -> dict[str, Any]:
        """Return what containerd would read.

        Args:
            view: the node.
            root: the root file; if it is missing, containerd uses its defaults.

        Raises:
            ConfigRefused: containerd would not start with this configuration.
        """
        files = load(view, root, relative_patterns=self.relative_patterns)
        with temporary_directory() as directory:
            copies = {file.path: f"{directory}/{n:04}.toml" for n, file in enumerate(files)}
            for file in files:
                if file.text is None and file.path != root:
                    continue
                # For a missing file any version will do; every release reads version 2.
                text = "version = 2\n" if file.text is None else file.text
                if (value := imports_value(text)) is not None:
                    named = [copies[name] for _, names in file.imports for name in names]
                    text = text[: value[0]] + tomltext.to_value(named) + text[value[1] :]
                with open(copies[file.path], "w", encoding="utf-8", newline="") as copy:
                    copy.write(text)
            missing = [file.path for file in files[1:] if file.text is None]
            if missing:
                # containerd 1.x reports this; 2.x silently skips all later imports.
                raise ConfigRefused(
                    f"the configuration in {root}",
                    found=f"it imports {missing[0]}, which does not exist",
                    do="remove that import, or create the file",
                )
            done = run([self.program, "--config", copies[root], "config", "dump"])
        if done.returncode == 0:
            try:
                return tomltext.parse(done.stdout)
            except tomllib.TOMLDecodeError as error:
                raise ConfigRefused(
                    f"the dump of {root} by {self.program}", found=f"not valid TOML: {error}"
                ) from error
        words = [line for line in done.stderr.splitlines() if line.strip()]
        output = words[-1] if words else f"exit code {done.returncode}"
        for path, written in copies.items():
            output = output.replace(written, path)
        raise ConfigRefused(f"the configuration in {root}", found=f"{self.program} says: {output}")


def cri(dump: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the table of the CRI plugin; empty if the plugin is disabled.

    Args:
        dump: the result of :meth:`Containerd.dump`.
    """
    plugins = dump.get("plugins", {})
    for name in CRI:
        table = plugins.get(name, {})
        if isinstance(table, dict) and "containerd" in table:
            return table
    return {}


def handlers(dump: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the runtime handlers by name."""
    found = cri(dump).get("containerd", {}).get("runtimes")
    return found if isinstance(found, dict) else {}


def differences(before: Any, after: Any, *path: str) -> Iterator[tuple[str, ...]]:
    """Yield the paths at which two dumps differ, as deep as possible.

    Args:
        before: a value of the first dump.
        after: the value at the same path of the second.
        path: the path of both values.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() | after.keys():
            if (*path, key) == ("imports",):
                continue
            if key not in before or key not in after:
                yield (*path, key)
            else:
                yield from differences(before[key], after[key], *path, key)
    elif before != after:
        yield path


def pruned(value: Any) -> Any:
    """Return a value without its empty parts; containerd makes no difference between the two."""
    if not isinstance(value, dict):
        return value
    items = ((key, pruned(each)) for key, each in value.items())
    return {
        key: each for key, each in items if isinstance(each, dict) or each not in ("", 0, False, [])
    }
