"""Add a runtime handler to CRI-O, in a drop-in of its own.

Rules
- CRI-O calls a containerd shim for a handler of type ``vm``. It starts the shim as containerd did
  before 2.3 and uses version 2 of the task API. No other type calls a shim.
- CRI-O ignores such a handler, or does not start if it is the default, unless the file name in
  ``runtime_path`` has the form ``containerd-shim-NAME-v2``. So we write a script with such a name
  next to the shim, which executes the shim.
- CRI-O creates the fifos of a container below ``runtime_root``. Without one their paths are
  relative, and the shim does not find them.
- CRI-O reads every file in crio.conf.d, sorted by name, after its own. A handler's table does not
  affect others. The whole drop-in is ours. A handler of that name in another file is removed only
  with ``replace``; --remove restores it.
- This has not been tested with a real CRI-O: the shim is driven with the calls found in CRI-O's
  source, and CRI-O checks the drop-in (``crio config``) where it is installed.

Source: crio.conf(5), crio.conf.d(5); CRI-O internal/oci/runtime_vm.go, pkg/config/config.go
(RuntimeTypeVMBinaryPattern, ValidateRuntimes).
"""

from __future__ import annotations

import glob
import os
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from integration import tomltext
from integration.engines.errors import (
    ConfigInvalid,
    ConfigRefused,
    EditImpossible,
    EngineNotInstalled,
    HandlerInUse,
    HandlerTaken,
    NotOurs,
)
from integration.engines.files import Change, Need
from integration.engines.programs import PATH, find_program, run, temporary_directory
from integration.engines.runtime_options import RuntimeOptions
from integration.engines.undo import HEAD, Record, View, changes, read_record, without

ENGINE: Final = "crio"
DEFAULT_CONFIG: Final = "/etc/crio/crio.conf"
DEFAULT_DROP_IN: Final = "/etc/crio/crio.conf.d/99-nvshim.conf"
SHIM: Final = "containerd-shim-nvidia-v1"

_NAME: Final = re.compile(r"containerd-shim-[a-zA-Z0-9+-]+-v2")
_SCRIPT: Final = "containerd-shim-nvidia-v2"
_SCRIPT_HEAD: Final = f"#!/bin/sh\n{HEAD}# CRI-O accepts no other name of a shim.\n"
_RUNTIME_ROOT: Final = "/run/nvshim"
_RUNTIMES: Final = ("crio", "runtime", "runtimes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(RuntimeOptions):
    """The desired configuration of CRI-O."""

    engine = ENGINE
    named_by = ("--drop-in", "drop_in", DEFAULT_DROP_IN)

    # CRI-O's own file; written only to replace a handler in it
    config: str = DEFAULT_CONFIG
    drop_in: str = DEFAULT_DROP_IN  # receives the handler


def plan(options: Options) -> Change:
    """Return the change that adds the handler to CRI-O."""
    options.check_name()
    record = read_record(options.record)
    previous = without(record, force=options.force)
    is_replaced = record.replaces(options.runtime_name, options.replace)
    view = _without_replaced(options, previous, is_replaced=is_replaced)
    shim = options.shim or _earlier_shim(options, record) or shutil.which(SHIM, path=PATH)
    if shim is None:
        raise EngineNotInstalled(
            f"the path of {SHIM}, which CRI-O needs", found=f"none in {PATH}",
            do="install it, or name it with --shim",
        )  # fmt: skip
    program = shim
    if _NAME.fullmatch(os.path.basename(shim)) is None:
        program = os.path.join(os.path.dirname(shim), _SCRIPT)
        script = f'{_SCRIPT_HEAD}exec {shlex.quote(shim)} "$@"\n'
        view = _with_file(options, view, program, script, "--shim")
    text = _body(options, program, record)
    view = _with_file(options, view, options.drop_in, text, "--drop-in")
    return _change(
        options, record, previous, view, replaced=is_replaced, notes=_validated(options, text)
    )


def plan_removal(options: Options) -> Change:
    """Return the change that removes everything of ours."""
    record = read_record(options.record)
    previous = without(record, force=options.force)
    if options.drop_in in record.files and not options.force:
        _check_default(options, previous, record.files[options.drop_in].after)
    return _change(options, record, previous, previous)


def _with_file(options: Options, view: View, path: str, text: str, option: str) -> View:
    """Return the node with a file that is wholly ours.

    Args:
        option: the option that chooses another path.
    """
    if view.text(path) is not None and not options.force:
        raise NotOurs(
            f"to write {path}", found="the file exists and nvshim did not write it",
            do=f"choose another path with {option}, or overwrite the file with --force",
        )  # fmt: skip
    return view.with_text(path, text)


def _earlier_shim(options: Options, record: Record) -> str | None:
    """Return the shim that an earlier call has configured; None for none that is still there."""
    written = record.files.get(options.drop_in)
    if written is None:
        return None
    program = str(_runtimes(tomltext.parse(written.after))[record.name]["runtime_path"])
    if script := record.files.get(program):
        program = shlex.split(script.after.splitlines()[-1])[1]
    return program if os.access(program, os.X_OK) else None


def _without_replaced(options: Options, view: View, *, is_replaced: bool) -> View:
    """Return CRI-O's files without the handler that ours replaces."""
    at = ("crio", "runtime", "runtimes", options.runtime_name)
    note = f"nvshim: the handler {options.runtime_name} that stood here comes back with --remove"
    for path, table in _others(options, view):
        found = _runtimes(table).get(options.runtime_name)
        if found is None:
            continue
        if not is_replaced:
            raise HandlerTaken(
                f"the handler {options.runtime_name} of CRI-O",
                found=f"{path} has one: {found}",
                do="add --replace to replace it (--remove restores it), or choose another "
                "--runtime-name",
            )
        text = tomltext.cut(view.text(path) or "", at, note)
        if options.runtime_name in _runtimes(tomltext.parse(text)):
            raise EditImpossible(
                f"to remove the handler {options.runtime_name} from {path}",
                found="it is not a table of its own",
                do=f"write it as [{tomltext.to_key(*at)}]",
            )
        view = view.edited(path, text, stood=True)
    return view


def _runtimes(table: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = table.get("crio", {}).get("runtime", {}).get("runtimes", {})
    return found


def _others(options: Options, view: View) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield CRI-O's files except ours."""
    directory = os.path.dirname(options.drop_in)
    pattern = f"{glob.escape(directory)}/**"
    paths = sorted(glob.glob(pattern, recursive=True, include_hidden=True))
    for path in (options.config, *paths):
        if path == options.drop_in or os.path.isdir(path):
            continue
        text = view.text(path)
        if text is None:
            continue
        try:
            table = tomltext.parse(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigInvalid(
                f"to read {path}", found=f"it is not valid TOML: {error}", do="correct it"
            ) from error
        _check_tables(path, table)
        yield path, table


def _check_tables(path: str, table: Any) -> None:
    """Check that what contains the handlers is tables."""
    for depth, name in enumerate(_RUNTIMES, 1):
        table = table.get(name, {})
        if not isinstance(table, dict):
            raise ConfigInvalid(
                f"to read {path}", found=f"{'.'.join(_RUNTIMES[:depth])} is not a table",
                do="correct it",
            )  # fmt: skip


def _check_default(options: Options, previous: View, ours: str) -> None:
    """Check that no other file makes the removed handler the default."""
    there = [_runtimes(table) for _, table in _others(options, previous)]
    for path, table in _others(options, previous):
        name = table.get("crio", {}).get("runtime", {}).get("default_runtime")
        if not isinstance(name, str):
            continue
        if name in _runtimes(tomltext.parse(ours)) and not any(name in each for each in there):
            raise HandlerInUse(
                f"to remove the handler {name}",
                found=f"{path} has default_runtime = {name}; without it no pod would start",
                do="set default_runtime to another handler first; --force removes it anyway",
            )


def _body(options: Options, program: str, record: Record) -> str:
    lines = []
    default = options.set_default
    if default is None and options.drop_in in record.files:
        ours = tomltext.parse(record.files[options.drop_in].after)
        default = "default_runtime" in ours["crio"]["runtime"]
    if default:
        name = tomltext.to_value(options.runtime_name)
        lines += ["[crio.runtime]", f"default_runtime = {name}", ""]
    return HEAD + "\n".join(
        [
            *lines,
            f"[{tomltext.to_key('crio', 'runtime', 'runtimes', options.runtime_name)}]",
            f"runtime_path = {tomltext.to_value(program)}",
            'runtime_type = "vm"',
            f"runtime_root = {tomltext.to_value(_RUNTIME_ROOT)}",
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
        return ("not checked by CRI-O, which is not installed here",)
    with temporary_directory() as directory:
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
    record: Record,
    previous: View,
    desired: View,
    *,
    replaced: bool = False,
    notes: tuple[str, ...] = (),
) -> Change:
    files = changes(
        options, record, previous, desired, config=options.drop_in, replaced=replaced,
        mode=dict.fromkeys((p for p in desired.changed if os.path.basename(p) == _SCRIPT), 0o755),
        # CRI-O reads every file of its directory, whatever its name.
        staging=os.path.dirname(os.path.dirname(os.path.realpath(options.drop_in))),
    )  # fmt: skip
    need, why = Need.RESTART, "CRI-O reads its handlers when it starts: it needs a restart"
    if not files:
        need, why = Need.NOTHING, "nothing changes: CRI-O needs no restart"
    return Change(ENGINE, files, need, why, options.drop_in, notes)
