"""Add our runtime to Docker's daemon.json, and provide what ``docker run --gpus`` needs.

Rules
- **daemon.json** gets ``runtimes.NAME.runtimeType`` and, on request, ``default-runtime`` and
  ``features.cdi``; everything else stays as it is. If the file has been edited since, a removal
  takes out only our members.
- **--gpus** works if dockerd finds a program ``nvidia-container-runtime-hook`` on its PATH when it
  starts. If there is none, we write a placeholder that only prints what it is for. Our shim removes
  the hook from the container's spec, so only another runtime can ever run the placeholder. If
  NVIDIA's own hook appears in /usr/bin later, the placeholder calls it.
- **A reload** (SIGHUP) updates dockerd's runtimes and default runtime. Members that were removed
  from the file stay in effect until a restart, and a removed default runtime makes dockerd reject
  the whole reload. dockerd looks for the hook and for CDI only when it starts.

Source: dockerd(8); moby daemon/reload.go, daemon/nvidia_linux.go; Docker 23's release notes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from integration.engines import jsontext
from integration.engines.errors import (
    ConfigInvalid,
    ConfigRefused,
    EditImpossible,
    EngineNotInstalled,
    EngineTooOld,
    HandlerInUse,
    HandlerTaken,
)
from integration.engines.files import Change, FileChange, Need
from integration.engines.programs import PATH, find_program, run, temporary_directory
from integration.engines.runtime_options import RuntimeOptions
from integration.engines.undo import (
    Record,
    View,
    Written,
    changes,
    read_record,
    undo_edits,
    without,
)
from integration.handlers import RUNTIME_TYPE
from integration.json_documents import parse_json

ENGINE: Final = "docker"
DEFAULT_CONFIG: Final = "/etc/docker/daemon.json"
HOOK: Final = "nvidia-container-runtime-hook"

# The first release that accepts a shim in daemon.json.
_FIRST: Final = 23
_NVIDIA_HOOK: Final = f"/usr/bin/{HOOK}"
_DEFAULT: Final = ("default-runtime",)
_CDI: Final = ("features", "cdi")
_CDI_AT_START: Final = "dockerd reads the CDI setting only when it starts: restart it"
_HOOK: Final = """\
#!/bin/sh
# Written by `nvshim configure docker`, which also takes it away (--remove).
#
# dockerd knows --gpus if it finds a program of this name when it starts. Containers get their
# GPUs from containerd-shim-nvidia-v1, which never runs this.
theirs={theirs}
if [ -x "$theirs" ] && ! [ "$theirs" -ef "$0" ]; then exec "$theirs" "$@"; fi
echo "this is nvshim's stand-in for NVIDIA's hook: --gpus works with --runtime {name} only" >&2
exit 1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(RuntimeOptions):
    """The desired configuration of Docker."""

    engine = ENGINE
    named_by = ("--config", "config", DEFAULT_CONFIG)

    config: str = DEFAULT_CONFIG  # daemon.json
    # whether Docker applies CDI specs itself (from 28.2 on it does); None keeps the earlier choice
    enable_cdi: bool | None = None
    hook_directory: str = "/usr/local/bin"  # for the placeholder hook, if there is no hook


def plan(options: Options) -> Change:
    """Return the change that adds the runtime to Docker."""
    options.check_name()
    program = find_program(options.program or "dockerd", "--dockerd")
    _check_release(program)
    record = read_record(options.record)
    previous = _without_nvshim(options, record)
    text = previous.text(options.config)
    before = _parsed(options.config, text)
    taken = _value_at(before, ("runtimes", options.runtime_name))
    is_replaced = record.replaces(options.runtime_name, options.replace)
    if taken is not None and not is_replaced:
        raise HandlerTaken(
            f"the runtime {options.runtime_name}",
            found=f"{options.config} has one: {json.dumps(taken)}",
            do="add --replace to replace it (--remove restores it), or choose another "
            "--runtime-name",
        )
    members = _members(options, before, record)
    desired = "{}\n" if text is None or _is_blank(text) else text
    for path, value in members:
        try:
            desired = jsontext.set_member(desired, path, value)
        except ValueError:
            raise EditImpossible(
                f"{'.'.join(path)} in {options.config}",
                found=f"{'.'.join(path[:-1])} is not an object",
                do="make it an object: { … }",
            ) from None
    _check_default(options, previous, desired)
    notes = _validated(options, program, text, desired)
    view = previous.with_text(options.config, desired)
    hooks = [path for path in record.files if os.path.basename(path) == HOOK]
    if hooks or shutil.which(HOOK, path=f"{PATH}:{options.hook_directory}") is None:
        hook = _HOOK.format(theirs=_NVIDIA_HOOK, name=options.runtime_name)
        view = view.with_text(os.path.join(options.hook_directory, HOOK), hook)
    return _change(options, record, previous, view, replaced=is_replaced, notes=notes)


def plan_removal(options: Options) -> Change:
    """Return the change that removes everything of ours."""
    record = read_record(options.record)
    previous = _without_nvshim(options, record)
    _check_default(options, previous, previous.text(options.config))
    return _change(options, record, previous, previous)


def _check_release(program: str) -> None:
    output = run([program, "--version"]).stdout
    found = re.search(r"version v?(\d+)\.(\d+)", output)
    if found is None:
        raise EngineNotInstalled(f"the version of {program}", found=output.strip() or "no answer")
    if int(found[1]) < _FIRST:
        raise EngineTooOld(
            f"a runtime of {RUNTIME_TYPE} in daemon.json",
            found=f"{program} is Docker {found[1]}.{found[2]}; {_FIRST} is the first release that "
            "accepts a shim there",
            do="update Docker, or link containerd-shim-runc-v2 to containerd-shim-nvidia-v1 in "
            "a directory that comes first on containerd's PATH",
        )


def _members(
    options: Options, before: Mapping[str, Any], record: Record
) -> list[tuple[tuple[str, ...], Any]]:
    there = _own_members(options, record)
    earlier = (there.get(("runtimes", record.name)) or {}).get("runtimeType")
    kind = options.shim or earlier or RUNTIME_TYPE
    default = _DEFAULT in there if options.set_default is None else options.set_default
    cdi = _CDI in there if options.enable_cdi is None else options.enable_cdi
    members: list[tuple[tuple[str, ...], Any]] = [
        (("runtimes", options.runtime_name), {"runtimeType": kind})
    ]
    if default and _value_at(before, _DEFAULT) != options.runtime_name:
        members.append((_DEFAULT, options.runtime_name))
    if cdi and _value_at(before, _CDI) is not True:
        members.append((_CDI, True))
    return members


def _without_nvshim(options: Options, record: Record) -> View:
    """Return the files as they would be if nvshim had never changed them."""
    _parsed(options.config, View().text(options.config))

    def undo(path: str, written: Written, text: str, force: bool) -> str | None:  # noqa: FBT001 - see Undo
        if path != options.config:
            return undo_edits(path, written, text, force)
        for at, value, was in reversed(_written_members(path, written)):
            if _value_at(_parsed(path, text), at) != value:
                continue  # changed since: no longer ours
            if was is not None:
                text = jsontext.set_member(text, at, was)
                continue
            text = jsontext.remove_member(text, at)
            if len(at) > 1 and _value_at(_parsed(path, text), at[:-1]) == {}:
                text = jsontext.remove_member(text, at[:-1])
        return text

    return without(record, force=options.force, undo=undo)


def _own_members(options: Options, record: Record) -> dict[tuple[str, ...], Any]:
    """Return the members of daemon.json that we wrote, by their paths."""
    written = record.files.get(options.config)
    found = () if written is None else _written_members(options.config, written)
    return {path: value for path, value, _ in found}


def _written_members(path: str, written: Written) -> list[tuple[tuple[str, ...], Any, Any]]:
    """Return what we wrote into daemon.json: path, value and previous value of each member."""
    before, after = _parsed(path, written.before), _parsed(path, written.after)
    names = after.get("runtimes") or {}
    paths = [*(("runtimes", name) for name in names), _DEFAULT, _CDI]
    found = [(at, _value_at(after, at), _value_at(before, at)) for at in paths]
    return [(at, value, was) for at, value, was in found if value != was]


def _parsed(path: str, text: str | None) -> dict[str, Any]:
    if text is None or _is_blank(text):
        return {}
    try:
        found = parse_json(text.removeprefix(jsontext.MARK))
    except ValueError as error:
        raise ConfigInvalid(
            f"to read {path}", found=f"it is not valid JSON: {error}", do="correct it"
        ) from error
    if not isinstance(found, dict):
        raise ConfigInvalid(f"to read {path}", found="it is not an object ({ … })", do="correct it")
    return found


def _is_blank(text: str) -> bool:
    """Whether dockerd treats a text as a file without settings."""
    return text.removeprefix(jsontext.MARK).strip() in ("", "null")


def _check_default(options: Options, previous: View, text: str | None) -> None:
    """Check that dockerd's default runtime stays defined."""
    there = previous.on_disk(options.config)
    now, after = _parsed(options.config, there), _parsed(options.config, text)
    name = after.get("default-runtime")
    gone = _has_runtime(now, name) and not _has_runtime(after, name)
    if gone and not options.force:
        raise HandlerInUse(
            f"to remove the runtime {name}",
            found=f"{options.config} has default-runtime = {name}, which nvshim did not write; "
            "without the runtime dockerd would not start",
            do="set it to another runtime first, such as runc; --force removes the runtime anyway",
        )


def _has_runtime(table: Mapping[str, Any], name: object) -> bool:
    runtimes = table.get("runtimes")
    return isinstance(name, str) and isinstance(runtimes, dict) and name in runtimes


def _value_at(value: Any, path: Any) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _validated(
    options: Options, program: str, previous: str | None, desired: str
) -> tuple[str, ...]:
    """Check that dockerd accepts the file.

    Returns:
        A note if dockerd refuses the file even without our changes, for example because the
        service's command line sets something that the file lacks.
    """
    output = _refusal(options, program, desired)
    if output is None:
        return ()
    if output == _refusal(options, program, "{}" if previous is None else previous):
        return (f"dockerd refuses {options.config}, even without our changes: {output}",)
    raise ConfigRefused(f"the configuration in {options.config}", found=f"{program} says: {output}")


def _refusal(options: Options, program: str, text: str) -> str | None:
    """Return dockerd's error for a file; None if it accepts the file."""
    with temporary_directory() as directory:
        path = f"{directory}/daemon.json"
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        argv = [program, "--validate", "--config-file", path]
        if "userland-proxy" not in text:
            argv.append("--userland-proxy=false")  # the proxy may not be installed here
        done = run(argv)
    output = (done.stderr or done.stdout).strip().replace(path, options.config)
    return output or f"exit code {done.returncode}" if done.returncode else None


def _change(
    options: Options,
    record: Record,
    previous: View,
    desired: View,
    *,
    replaced: bool = False,
    notes: tuple[str, ...] = (),
) -> Change:
    hooks = (path for path in desired.changed if os.path.basename(path) == HOOK)
    files = changes(
        options, record, previous, desired, config=options.config, replaced=replaced,
        mode=dict.fromkeys(hooks, 0o755),
    )  # fmt: skip
    need, why = _need(options, files)
    return Change(ENGINE, files, need, why, options.config, notes)


def _need(options: Options, files: Sequence[FileChange]) -> tuple[Need, str]:
    if any(os.path.basename(c.path) == HOOK and c.action != "changed" for c in files):
        return Need.RESTART, "dockerd looks for the --gpus hook only when it starts: restart it"
    config = next((change for change in files if change.path == options.config), None)
    if config is None:
        return Need.NOTHING, "nothing that dockerd reads changes: it needs no restart"
    old, new = (
        _parsed(options.config, None if content is None else content.decode())
        for content in (config.old, config.new)
    )
    if _value_at(old, ("features", "cdi")) != _value_at(new, ("features", "cdi")):
        return Need.RESTART, _CDI_AT_START
    if old == new:
        return Need.NOTHING, "nothing that dockerd reads changes: it needs no restart"
    if any(key in old and key not in new for key in ("runtimes", "default-runtime")):
        return Need.RESTART, "a reload of dockerd keeps members that were removed: restart it"
    return Need.RELOAD, "dockerd has to reload its configuration (--restart signal)"
