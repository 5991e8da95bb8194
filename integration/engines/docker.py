"""Docker's runtime of ours in daemon.json, and what ``docker run --gpus`` needs.

Rules
- **daemon.json** gets ``runtimes.NAME.runtimeType``, and ``default-runtime`` and ``features.cdi``
  if asked; all else in it stays as it is. It can hold no mark, so what it was is in a record of
  ours: with it the inverse is exact, and if somebody else has changed the file meanwhile, only
  our members are taken out.
- **--gpus** is known to a dockerd that finds a program ``nvidia-container-runtime-hook`` on its
  PATH when it starts. Where there is none we leave one whose only job is to say what it is: our
  shim takes the hook out of the container's spec, so only another runtime can ever run it. If
  NVIDIA's own comes to /usr/bin later, ours hands over to it.
- **A reload** (SIGHUP) tells dockerd of runtimes and of the default one. What is no longer in the
  file stays as it was until a restart, and a default runtime that is gone so makes it drop the
  whole reload. The hook and CDI it looks for when it starts.

Source: dockerd(8); moby daemon/reload.go, daemon/nvidia_linux.go; Docker 23's release notes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any, Final

from integration.engines import jsontext, marks
from integration.engines.errors import (
    ChangedByHand,
    ConfigInvalid,
    ConfigRefused,
    EditImpossible,
    EngineNotInstalled,
    EngineTooOld,
    HandlerInUse,
    HandlerTaken,
    RecordInvalid,
)
from integration.engines.files import (
    Change,
    FileChange,
    Need,
    missing_directories,
    read,
    read_text,
)
from integration.engines.options import RUNTIME_TYPE, check_name
from integration.engines.programs import PATH, find_program, run

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DEFAULT_CONFIG", "HOOK", "Options", "plan", "plan_removal"]

ENGINE: Final = "docker"
DEFAULT_CONFIG: Final = "/etc/docker/daemon.json"
HOOK: Final = "nvidia-container-runtime-hook"

# The first that can be told of a shim in daemon.json.
_FIRST: Final = 23
_NVIDIAS: Final = f"/usr/bin/{HOOK}"
# What a record has: daemon.json as it was, the digest of what it became, our members (path, value,
# former value), our hook, and the directories that were made for each file.
_RECORD: Final[Mapping[str, Any]] = {
    "config": str, "before": (str, NoneType), "sha256": str, "members": list,
    "hook": (str, NoneType), "directories": dict,
}  # fmt: skip
_MEMBER: Final = 3
_DEFAULT: Final = ("default-runtime",)
_CDI: Final = ("features", "cdi")
_CDI_AT_START: Final = "dockerd looks for CDI specs if it was told to at its start: restart it"
_HOOK_BODY: Final = """\
#
# dockerd knows --gpus if it finds a program of this name when it starts. Containers get their
# GPUs from containerd-shim-nvidia-v1, which never runs this.
theirs={theirs}
if [ -x "$theirs" ] && ! [ "$theirs" -ef "$0" ]; then exec "$theirs" "$@"; fi
echo "this is nvshim's stand-in for NVIDIA's hook: --gpus works with --runtime {name} only" >&2
exit 1
"""


@dataclass(frozen=True, slots=True)
class Options:
    """What is wanted.

    Attributes:
        config: daemon.json.
        runtime_name: as ``docker run --runtime`` names it.
        set_default: whether containers that name no runtime get it; None for what was configured
            before.
        shim: path of the shim; None for the one on containerd's PATH.
        enable_cdi: whether Docker applies CDI specs itself (from 28.2 on it does); likewise.
        hook_directory: where the hook's stand-in is made if there is none.
        records: the directory of our record.
        program: dockerd; None for the installed one.
        force: whether what was changed by hand is lost.
    """

    config: str = DEFAULT_CONFIG
    runtime_name: str = "nvidia"
    set_default: bool | None = None
    shim: str | None = None
    enable_cdi: bool | None = None
    hook_directory: str = "/usr/local/bin"
    records: str = "/etc/containerd-shim-nvidia/configured"
    program: str | None = None
    force: bool = False

    @property
    def record(self) -> str:
        """The record of this daemon.json."""
        digest = hashlib.sha256(self.config.encode()).hexdigest()[:8]
        name = "docker.json" if self.config == DEFAULT_CONFIG else f"docker-{digest}.json"
        return os.path.join(self.records, name)


@dataclass(frozen=True, slots=True)
class _Former:
    """The files without us.

    Attributes:
        text: daemon.json; None for none.
        hook: the path of our hook that is there; None for none.
        directories: that were made for each file of ours.
        members: what of daemon.json was ours.
    """

    text: str | None
    hook: str | None
    directories: Mapping[str, tuple[str, ...]]
    members: frozenset[tuple[str, ...]] = frozenset()


def plan(options: Options) -> Change:
    """What has to change so that Docker has the runtime.

    Args:
        options: what is wanted.

    Returns:
        The change, which is empty if it has it already.

    Raises:
        EnginesError: it cannot be had.
    """
    check_name(options.runtime_name)
    program = find_program(options.program or "dockerd", "--dockerd")
    _check_release(program)
    former = _without_us(options)
    before = _parsed(options.config, former.text)
    runtimes = before.get("runtimes", {})
    if isinstance(runtimes, dict) and options.runtime_name in runtimes:
        raise HandlerTaken(
            f"the runtime {options.runtime_name} for {RUNTIME_TYPE}",
            found=f"{options.config} has one: {json.dumps(runtimes[options.runtime_name])}",
            do="remove it (NVIDIA's by `nvidia-ctk`), or choose another --runtime-name",
        )
    members = _members(options, before, former.members)
    wanted = "{}\n" if former.text is None or _is_blank(former.text) else former.text
    for path, value in members:
        try:
            wanted = jsontext.set_member(wanted, path, value)
        except ValueError:
            raise EditImpossible(
                f"{'.'.join(path)} in {options.config}",
                found=f"{'.'.join(path[:-1])} is no object",
            ) from None
    _check_default(options, wanted)
    notes = _validated(options, program, former.text, wanted)
    hook, hook_text = former.hook, None
    if hook is not None or shutil.which(HOOK, path=_hook_path(options)) is None:
        hook = os.path.join(options.hook_directory, HOOK)
        hook_text = _hook(options)
    record = {
        "config": options.config,
        "before": former.text,
        "sha256": _digest(wanted),
        "members": [[list(path), value, _at(before, path)] for path, value in members],
        "hook": hook if hook_text is not None else None,
        "directories": {
            path: list(former.directories.get(path) or missing_directories(path))
            for path in filter(None, (options.config, options.record, hook_text and hook))
        },
    }
    files: list[tuple[str, str | None, int]] = [
        (options.record, json.dumps(record, indent=2) + "\n", 0o644)
    ]
    if former.hook is not None and former.hook != hook:
        files.append((former.hook, None, 0))
    if hook is not None and hook_text is not None:
        files.append((hook, hook_text, 0o755))
    files.append((options.config, wanted, 0o644))
    return _change(options, files, former, notes)


def plan_removal(options: Options) -> Change:
    """What has to change so that nothing of ours is left.

    Args:
        options: where to look.

    Returns:
        The change, which is empty if there is nothing of ours.

    Raises:
        EnginesError: a file cannot be read, or was changed by hand.
    """
    former = _without_us(options)
    _check_default(options, former.text)
    files: list[tuple[str, str | None, int]] = [(options.config, former.text, 0o644)]
    if former.hook is not None:
        files.append((former.hook, None, 0))
    files.append((options.record, None, 0))
    return _change(options, files, former)


def _check_release(program: str) -> None:
    said = run([program, "--version"]).stdout
    found = re.search(r"version v?(\d+)\.(\d+)", said)
    if found is None:
        raise EngineNotInstalled(f"the version of {program}", found=said.strip() or "no answer")
    if int(found[1]) < _FIRST:
        raise EngineTooOld(
            f"a runtime of {RUNTIME_TYPE} in daemon.json",
            found=f"{program} is of Docker {found[1]}.{found[2]}; {_FIRST} is the first that "
            "can be told of a shim",
            do="update Docker, or link containerd-shim-runc-v2 to containerd-shim-nvidia-v1 in "
            "a directory that comes first on containerd's PATH",
        )


def _members(
    options: Options, before: Mapping[str, Any], there: frozenset[tuple[str, ...]]
) -> list[tuple[tuple[str, ...], Any]]:
    default = _DEFAULT in there if options.set_default is None else options.set_default
    cdi = _CDI in there if options.enable_cdi is None else options.enable_cdi
    members: list[tuple[tuple[str, ...], Any]] = [
        (("runtimes", options.runtime_name), {"runtimeType": options.shim or RUNTIME_TYPE})
    ]
    if default and _at(before, _DEFAULT) != options.runtime_name:
        members.append((_DEFAULT, options.runtime_name))
    if cdi and _at(before, _CDI) is not True:
        members.append((_CDI, True))
    return members


def _without_us(options: Options) -> _Former:
    """The files as they would be had we never been there."""
    text = _text(options.config)
    _parsed(options.config, text)
    record = _read_record(options)
    if record is None:
        return _Former(text, None, {})
    directories = {path: tuple(made) for path, made in record["directories"].items()}
    hook = record["hook"] if _is_our_hook(options, record["hook"]) else None
    members = frozenset(tuple(member[0]) for member in record["members"])
    return _Former(_config_without_us(options, text, record), hook, directories, members)


def _is_our_hook(options: Options, path: str | None) -> bool:
    found = None if path is None else _text(path)
    owned = None if found is None else marks.read_owned(found.partition("\n")[2])
    if owned is None:
        return False  # it is gone, or somebody else's by now
    if not owned.intact and not options.force:
        raise ChangedByHand(
            f"to write or remove {path}", found="it was changed since nvshim made it",
            do="look at it; --force overwrites or removes it",
        )  # fmt: skip
    return True


def _config_without_us(options: Options, text: str | None, record: Mapping[str, Any]) -> str | None:
    """daemon.json as it would be had we never been there."""
    if text is None:
        return None  # nothing of ours is in it, and nothing is to be put there
    if _digest(text) == record["sha256"]:
        before: str | None = record["before"]
        return before
    if text == record["before"]:
        return text
    for path, value, was in reversed(record["members"]):
        if _at(_parsed(options.config, text), path) != value:
            continue  # somebody else's by now
        if was is not None:
            text = jsontext.set_member(text, path, was)
            continue
        text = jsontext.remove_member(text, path)
        if len(path) > 1 and _at(_parsed(options.config, text), path[:-1]) == {}:
            text = jsontext.remove_member(text, path[:-1])
    return text


def _read_record(options: Options) -> Mapping[str, Any] | None:
    text = _text(options.record)
    if text is None:
        return None
    try:
        record = json.loads(text)
    except ValueError:
        record = None
    if not _is_record(record):
        raise RecordInvalid(
            f"to read {options.record}", found="it is no record of ours",
            do=f"take our members out of {options.config} by hand, and remove the record",
        )  # fmt: skip
    found: Mapping[str, Any] = record
    return found


def _is_record(value: Any) -> bool:
    """Whether a value is what :func:`plan` writes down."""
    if not isinstance(value, dict) or value.keys() != _RECORD.keys():
        return False
    if not all(isinstance(value[key], kind) for key, kind in _RECORD.items()):
        return False
    members, directories = value["members"], value["directories"]
    return all(
        isinstance(member, list) and len(member) == _MEMBER and isinstance(member[0], list)
        for member in members
    ) and all(isinstance(made, list) for made in directories.values())


def _text(path: str) -> str | None:
    content = read(path)
    return None if content is None else read_text(path, content)


def _parsed(path: str, text: str | None) -> dict[str, Any]:
    if text is None or _is_blank(text):
        return {}
    try:
        found = json.loads(text.removeprefix(jsontext.MARK))
    except (ValueError, RecursionError) as error:
        raise ConfigInvalid(f"to read {path}", found=f"no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigInvalid(f"to read {path}", found="it is no object ({ … })")
    return found


def _is_blank(text: str) -> bool:
    """Whether dockerd takes a text for a file without settings."""
    return text.removeprefix(jsontext.MARK).strip() in ("", "null")


def _check_default(options: Options, text: str | None) -> None:
    """That dockerd's default runtime is not taken away."""
    now, after = _parsed(options.config, _text(options.config)), _parsed(options.config, text)
    name = after.get("default-runtime")
    gone = name in (now.get("runtimes") or {}) and name not in (after.get("runtimes") or {})
    if gone and not options.force:
        raise HandlerInUse(
            f"to take the runtime {name} away",
            found=f"{options.config} has default-runtime = {name}, and nvshim has not written "
            "that: dockerd would not start",
            do="give it another value first, such as runc; --force removes the runtime anyway",
        )


def _at(value: Any, path: Any) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _validated(options: Options, program: str, former: str | None, wanted: str) -> tuple[str, ...]:
    """See that dockerd takes the file.

    Returns:
        What a person should know: that it does not take the file without us either, as where
        the service's command line has what the file lacks.
    """
    said = _refusal(options, program, wanted)
    if said is None:
        return ()
    if said == _refusal(options, program, "{}" if former is None else former):
        return (f"by itself, dockerd refuses {options.config}, without us too: {said}",)
    raise ConfigRefused(f"the configuration in {options.config}", found=f"{program} says: {said}")


def _refusal(options: Options, program: str, text: str) -> str | None:
    """What dockerd has against a file; None if nothing."""
    with tempfile.NamedTemporaryFile("w", prefix="nvshim-", suffix=".json") as file:
        file.write(text)
        file.flush()
        argv = [program, "--validate", "--config-file", file.name]
        if "userland-proxy" not in text:
            argv.append("--userland-proxy=false")  # whether that is installed is not the question
        done = run(argv)
    said = (done.stderr or done.stdout).strip().replace(file.name, options.config)
    return said or f"exit code {done.returncode}" if done.returncode else None


def _hook_path(options: Options) -> str:
    return f"{PATH}:{options.hook_directory}"


def _hook(options: Options) -> str:
    body = _HOOK_BODY.format(theirs=_NVIDIAS, name=options.runtime_name)
    return f"#!/bin/sh\n{marks.owned(ENGINE, body, {})}"


def _change(
    options: Options,
    files: list[tuple[str, str | None, int]],
    former: _Former,
    notes: tuple[str, ...] = (),
) -> Change:
    planned = (
        FileChange.to(path, text, made=former.directories.get(path, ()), mode=mode)
        for path, text, mode in files
    )
    changes = list(filter(None, planned))
    need, why = _need(options, changes)
    return Change(ENGINE, tuple(changes), need, why, options.config, notes)


def _need(options: Options, changes: list[FileChange]) -> tuple[Need, str]:
    if any(os.path.basename(c.path) == HOOK and c.action != "changed" for c in changes):
        return Need.RESTART, "dockerd looks for what --gpus needs when it starts: restart it"
    config = next((change for change in changes if change.path == options.config), None)
    if config is None:
        return Need.NOTHING, "nothing that dockerd reads changes: it needs no restart"
    old, new = (
        _parsed(options.config, None if content is None else content.decode())
        for content in (config.old, config.new)
    )
    if _at(old, ("features", "cdi")) != _at(new, ("features", "cdi")):
        return Need.RESTART, _CDI_AT_START
    if old == new:
        return Need.NOTHING, "nothing that dockerd reads changes: it needs no restart"
    if any(key in old and key not in new for key in ("runtimes", "default-runtime")):
        return Need.RESTART, "a reload of dockerd keeps what is gone from its file: restart it"
    return Need.RELOAD, "dockerd has to reload its configuration (--restart signal)"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
