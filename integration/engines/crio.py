"""A runtime handler of CRI-O, in a drop-in of its own.

Rules
- CRI-O calls a shim of containerd's kind for a handler of the type ``vm``: it starts it as
  containerd did before 2.3, and speaks version 2 of its task API with it. ``runtime_path`` is the
  shim's path. There is no other type with which it would call a shim.
- CRI-O reads every file in crio.conf.d, sorted by name, over its own; a table of a handler does not
  disturb others. The drop-in is ours as a whole.
- No CRI-O has been tried with it: the shim is driven by the calls that its source has, and what is
  written is checked by CRI-O itself (``crio config``) where it is installed.

Source: crio.conf(5), crio.conf.d(5); CRI-O internal/oci/runtime_vm.go.
"""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
import tomllib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from integration.engines import marks, tomltext
from integration.engines.errors import (
    ChangedByHand,
    ConfigInvalid,
    ConfigRefused,
    EngineNotInstalled,
    HandlerInUse,
    HandlerTaken,
    NotOurs,
)
from integration.engines.files import (
    Change,
    FileChange,
    Need,
    missing_directories,
    read,
    read_text,
)
from integration.engines.options import check_name
from integration.engines.programs import PATH, find_program, run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["DEFAULT_CONFIG", "DEFAULT_DROP_IN", "Options", "plan", "plan_removal"]

ENGINE: Final = "crio"
DEFAULT_CONFIG: Final = "/etc/crio/crio.conf"
DEFAULT_DROP_IN: Final = "/etc/crio/crio.conf.d/99-nvshim.conf"
SHIM: Final = "containerd-shim-nvidia-v1"


@dataclass(frozen=True, slots=True)
class Options:
    """What is wanted.

    Attributes:
        config: CRI-O's own file, which is only read.
        drop_in: where the handler is written.
        runtime_name: the handler, as a RuntimeClass names it.
        set_default: whether pods that name no handler get it; None for what was configured before.
        shim: path of the shim; None for the one on the path of system services.
        program: crio; None for the installed one, if there is one.
        force: whether what was changed by hand is lost.
    """

    config: str = DEFAULT_CONFIG
    drop_in: str = DEFAULT_DROP_IN
    runtime_name: str = "nvidia"
    set_default: bool | None = None
    shim: str | None = None
    program: str | None = None
    force: bool = False


def plan(options: Options) -> Change:
    """What has to change so that CRI-O has the handler.

    Args:
        options: what is wanted.

    Returns:
        The change, which is empty if it has it already.

    Raises:
        EnginesError: it cannot be had.
    """
    check_name(options.runtime_name)
    old, record = _ours(options)
    for path, table in _others(options):
        found = table.get("crio", {}).get("runtime", {}).get("runtimes", {})
        if options.runtime_name in found:
            raise HandlerTaken(
                f"the handler {options.runtime_name} of CRI-O",
                found=f"{path} has one: {found[options.runtime_name]}",
                do="remove it, or choose another --runtime-name",
            )
    shim = options.shim or shutil.which(SHIM, path=PATH)
    if shim is None:
        raise EngineNotInstalled(
            f"the path of {SHIM}, which CRI-O has to be told", found=f"none in {PATH}",
            do="install it, or name it with --shim",
        )  # fmt: skip
    directories = record.get("directories", list(missing_directories(options.drop_in)))
    text = marks.owned(ENGINE, _body(options, shim, old), {"directories": directories})
    return _change(options, old, text, notes=_validated(options, text))


def plan_removal(options: Options) -> Change:
    """What has to change so that nothing of ours is left.

    Args:
        options: where to look.

    Returns:
        The change, which is empty if there is nothing of ours.

    Raises:
        EnginesError: the file cannot be read, or was changed by hand.
    """
    old, record = _ours(options)
    if old is not None and not options.force:
        _check_default(options, read_text(options.drop_in, old))
    return _change(options, old, None, record.get("directories", ()))


def _ours(options: Options) -> tuple[bytes | None, dict[str, Any]]:
    """Our drop-in with its record, if it is there."""
    content = read(options.drop_in)
    if content is None:
        return None, {}
    owned = marks.read_owned(read_text(options.drop_in, content))
    if options.force:
        return content, {} if owned is None else dict(owned.record)
    if owned is None:
        raise NotOurs(
            f"to write or remove {options.drop_in}", found="it is a file of somebody else",
            do="choose another place with --drop-in, or overwrite it with --force",
        )  # fmt: skip
    if not owned.intact:
        raise ChangedByHand(
            f"to write or remove {options.drop_in}", found="it was changed since",
            do="look at it; --force overwrites or removes it",
        )  # fmt: skip
    return content, dict(owned.record)


def _others(options: Options) -> Iterator[tuple[str, dict[str, Any]]]:
    """CRI-O's files but ours."""
    directory = os.path.dirname(options.drop_in)
    pattern = f"{glob.escape(directory)}/**"
    paths = sorted(glob.glob(pattern, recursive=True, include_hidden=True))
    for path in (options.config, *paths):
        if path == options.drop_in or os.path.isdir(path):
            continue
        content = read(path)
        if content is None:
            continue
        try:
            yield path, tomltext.parse(read_text(path, content))
        except tomllib.TOMLDecodeError as error:
            raise ConfigInvalid(f"to read {path}", found=f"no TOML: {error}") from error


def _check_default(options: Options, ours: str) -> None:
    """That what is to go is not what others have made the default."""
    runtime = _runtime(ours)
    for path, table in _others(options):
        name = table.get("crio", {}).get("runtime", {}).get("default_runtime")
        if name in runtime.get("runtimes", {}):
            raise HandlerInUse(
                f"to take the handler {name} away",
                found=f"{path} has default_runtime = {name}: no pod would start",
                do="give it another value first; --force removes the handler anyway",
            )


def _runtime(ours: str) -> dict[str, Any]:
    table: dict[str, Any] = tomltext.parse(ours).get("crio", {}).get("runtime", {})
    return table


def _body(options: Options, shim: str, old: bytes | None) -> str:
    lines = []
    default = options.set_default
    if default is None and old is not None and marks.read_owned(old.decode(errors="replace")):
        default = "default_runtime" in _runtime(read_text(options.drop_in, old))
    if default:
        name = tomltext.to_value(options.runtime_name)
        lines += ["[crio.runtime]", f"default_runtime = {name}", ""]
    return "\n".join(
        [
            *lines,
            f"[{tomltext.to_key('crio', 'runtime', 'runtimes', options.runtime_name)}]",
            f"runtime_path = {tomltext.to_value(shim)}",
            'runtime_type = "vm"',
            "",
        ]
    )


def _validated(options: Options, text: str) -> tuple[str, ...]:
    tomllib.loads(text)
    try:
        program = find_program(options.program or "crio", "--crio")
    except EngineNotInstalled:
        if options.program is not None:
            raise
        return ("not looked at by CRI-O, which is not installed here",)
    with tempfile.TemporaryDirectory(prefix="nvshim-") as directory:
        with open(f"{directory}/nvshim.conf", "w", encoding="utf-8") as file:
            file.write(text)
        done = run([program, "--config", "", "--config-dir", directory, "config"])
    if done.returncode:
        raise ConfigRefused(
            f"the handler in {options.drop_in}", found=f"{program} says: {done.stderr.strip()}"
        )
    return ()


def _change(
    options: Options,
    old: bytes | None,
    text: str | None,
    made: Sequence[str] = (),
    notes: tuple[str, ...] = (),
) -> Change:
    # CRI-O reads every file of its directory, whatever its name.
    staging = os.path.dirname(os.path.dirname(os.path.realpath(options.drop_in)))
    change = FileChange.to(options.drop_in, text, made=made, staging=staging)
    if change is None:
        why = "nothing changes: CRI-O needs no restart"
        return Change(ENGINE, (), Need.NOTHING, why, options.drop_in, notes)
    # What the text was made of, or who has changed the file since would be overwritten.
    change = replace(change, old=old)
    why = "CRI-O reads its handlers when it starts: it needs a restart"
    return Change(ENGINE, (change,), Need.RESTART, why, options.drop_in, notes)
