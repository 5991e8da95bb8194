"""What containerd makes of a configuration: ``containerd config dump``, before it is in place.

Rules
- containerd is the judge of its own configuration: what it refuses, or reads otherwise than was
  meant, is never put in place.
- It is asked about copies: every file of the configuration is written into a directory of ours,
  with the imports leading to the copies. Nothing on the node has to change for that.
- Two dumps are compared value by value. The list of imports is left out of it.

Source: containerd-config(8), cmd/containerd/command/config.go.
"""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Final

from integration import tomltext
from integration.engines.errors import ConfigRefused
from integration.engines.imports import imports_value, load
from integration.engines.programs import find_program, run, version_of
from integration.engines.running import running_program
from integration.engines.undo import View

# The plugin that has the handlers, newest first.
CRI: Final = ("io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri")

CONTAINERD: Final = "containerd"
IMAGES: Final = "io.containerd.cri.v1.images"
"""The plugin that has containerd 2's settings of images."""


class Containerd:
    """The node's containerd, as far as it can be asked without running.

    Args:
        program: its path or name; None for the one that runs, or else containerd on the path of
            system services.
        socket: where one may run; "" for none.

    Attributes:
        program: its path.
        version: "1.7.24~ds1".
        release: (1, 7).

    Raises:
        EngineNotInstalled: there is none, or it does not say which it is.
        EngineElsewhere: another one runs, whose program is not found.
    """

    def __init__(self, program: str | None = None, socket: str = "") -> None:
        if program is None and socket:
            program = running_program(socket, CONTAINERD)
        self.program = find_program(program or CONTAINERD, "--containerd")
        self.version = version_of(self.program)
        major, minor = self.version.removeprefix("v").split(".")[:2]
        self.release = int(major), int(minor)

    def __str__(self) -> str:
        """Which it is, for people."""
        return f"containerd {self.version} ({self.program})"

    @property
    def merges(self) -> bool:
        """Whether it merges a plugin's table of an imported file into that of the root file.

        containerd 1.x replaces the table: all that the root file says of the plugin is lost.
        """
        return self.release >= (2, 0)

    @cached_property
    def relative_patterns(self) -> bool:
        """Whether a relative pattern of imports is meant from the directory of its file.

        Else it is from containerd's own working directory. That changed within 1.6 and 1.7, and
        distributions take over what they like; so it is tried.
        """
        if self.merges:
            return True
        with tempfile.TemporaryDirectory(prefix="nvshim-") as directory:
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
        """What it would read.

        Args:
            view: the node.
            root: the root file; one that is not there means containerd's defaults.

        Raises:
            ConfigRefused: it would not start with that.
        """
        files = load(view, root, relative_patterns=self.relative_patterns)
        with tempfile.TemporaryDirectory(prefix="nvshim-") as directory:
            copies = {file.path: f"{directory}/{n:04}.toml" for n, file in enumerate(files)}
            for file in files:
                if file.text is None and file.path != root:
                    continue
                # Without a file its format does not matter; version 2 is known to all.
                text = "version = 2\n" if file.text is None else file.text
                if (value := imports_value(text)) is not None:
                    named = [copies[name] for _, names in file.imports for name in names]
                    text = text[: value[0]] + tomltext.to_value(named) + text[value[1] :]
                with open(copies[file.path], "w", encoding="utf-8", newline="") as copy:
                    copy.write(text)
            missing = [file.path for file in files[1:] if file.text is None]
            if missing:
                # containerd 1.x says so, 2.x leaves out whatever comes after it.
                raise ConfigRefused(
                    f"the configuration in {root}",
                    found=f"it imports {missing[0]}, which is not there",
                    do="take that import out, or write the file",
                )
            done = run([self.program, "--config", copies[root], "config", "dump"])
        if done.returncode == 0:
            try:
                return tomltext.parse(done.stdout)
            except tomllib.TOMLDecodeError as error:
                raise ConfigRefused(
                    f"the dump of {root} by {self.program}", found=f"no TOML: {error}"
                ) from error
        words = [line for line in done.stderr.splitlines() if line.strip()]
        output = words[-1] if words else f"exit code {done.returncode}"
        for path, written in copies.items():
            output = output.replace(written, path)
        raise ConfigRefused(f"the configuration in {root}", found=f"{self.program} says: {output}")


def cri(dump: Mapping[str, Any]) -> Mapping[str, Any]:
    """The table of the plugin that serves a kubelet; empty if it is disabled.

    Args:
        dump: as :meth:`Containerd.dump` gives it.
    """
    plugins = dump.get("plugins", {})
    for name in CRI:
        table = plugins.get(name, {})
        if isinstance(table, dict) and "containerd" in table:
            return table
    return {}


def handlers(dump: Mapping[str, Any]) -> Mapping[str, Any]:
    """The runtime handlers, by their names."""
    found = cri(dump).get("containerd", {}).get("runtimes")
    return found if isinstance(found, dict) else {}


def differences(before: Any, after: Any, *path: str) -> Iterator[tuple[str, ...]]:
    """The paths at which two dumps differ, as deep as they can be told.

    Args:
        before: a value of the one.
        after: that of the other.
        path: where they are.
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
    """A value without what is empty in it: to containerd that is the same."""
    if not isinstance(value, dict):
        return value
    items = ((key, pruned(each)) for key, each in value.items())
    return {
        key: each for key, each in items if isinstance(each, dict) or each not in ("", 0, False, [])
    }
