"""A node with our handler: the tables, and the files that they go into.

See :mod:`integration.engines.containerd` for the rules.
"""

from __future__ import annotations

import os
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from integration import tomltext
from integration.engines.checks import generated
from integration.engines.effective_config import (
    IMAGES,
    Containerd,
    cri,
    differences,
    handlers,
    pruned,
)
from integration.engines.errors import DropInReplaces, EditImpossible, NotOurs, ShimNotFound
from integration.engines.imports import (
    File,
    covers,
    imports_value,
    is_of_any_version,
    load,
    parse,
)
from integration.engines.options import (
    PLUGINS,
    Options,
    default_drop_in,
    drop_in_place,
    handlers_path,
)
from integration.engines.programs import PATH
from integration.engines.undo import HEAD, Record, View
from integration.handlers import RUNC_TYPE, RUNTIME_TYPE, calls_our_shim
from shim import PROGRAM

_NEVER_MERGED: Final = 1  # a file of this version is not imported by any that merges
_MERGED_VERSION: Final = 3  # the version that each release which merges reads

# containerd 1.6 hands on nothing of a handler's options to a shim that it does not know but this.
_ONLY_CONFIG_PATH: Final = (1, 7)

_NO_OPTIONS_NEEDED: Final = (2, 0)

# What containerd 2 takes over from a file of version 2 to the plugin of images only where a handler
# is named: with ours, it would begin to heed what it has overlooked, such as a snapshotter that the
# node does not have.
_CONDITIONAL_IMAGE_SETTINGS: Final = (
    "snapshotter",
    "disable_snapshot_annotations",
    "discard_unpacked_layers",
)

_BEGIN: Final = "# >>> nvshim configure containerd; --remove takes it out again"
_END: Final = "# <<< nvshim"

_Table = tuple[tuple[str, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Preserved:
    """What containerd would read differently only because a handler is named."""

    handlers: Mapping[str, Any] = field(default_factory=dict)  # built-in ones that it would forget
    # of images, as it reads them without us
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self.handlers or self.settings)


def with_earlier_choices(
    options: Options, before: Mapping[str, Any], now: Mapping[str, Any] | None
) -> Options:
    """What is wanted, and for all that nobody says what we have configured by now.

    Args:
        options: what somebody says.
        before: containerd's dump of the node without us.
        now: that of the node as it is; None if containerd would not start.

    Raises:
        ShimNotFound: the handler is to have runc's type, and no path is ours.
    """
    now = now or before
    default = cri(now).get("containerd", {}).get("default_runtime_name")
    is_default = default != cri(before).get("containerd", {}).get("default_runtime_name")
    has_cdi = bool(cri(now).get("enable_cdi")) and not cri(before).get("enable_cdi")
    ours: Mapping[str, Any] = next(
        (
            handler
            for name, handler in handlers(now).items()
            if _is_ours(handler) and not _is_ours(handlers(before).get(name, {}))
        ),
        {},
    )
    annotations = options.pod_annotations
    kind = options.runtime_type or ours.get("runtime_type") or RUNTIME_TYPE
    shim = options.shim or ours.get("runtime_path") or None
    return replace(
        options,
        set_default=is_default if options.set_default is None else options.set_default,
        enable_cdi=has_cdi if options.enable_cdi is None else options.enable_cdi,
        runtime_type=kind,
        shim=_shim_for_runc_type(shim) if kind == RUNC_TYPE else shim,
        pod_annotations=tuple(ours.get("pod_annotations") or ())
        if annotations is None else annotations,
    )  # fmt: skip


def earlier_drop_in(options: Options, record: Record) -> str | None:
    """Where an earlier call has written the drop-in; None if nowhere, or at its usual place."""
    for path, written in record.files.items():
        has_handler = tomltext.to_key("runtimes", record.name) in written.after
        if has_handler and not written.edits and path != default_drop_in(options):
            return path
    return None


def _is_ours(handler: Mapping[str, Any]) -> bool:
    return calls_our_shim(handler.get("runtime_type"), handler.get("runtime_path"))


def _shim_for_runc_type(shim: str | None) -> str:
    """The path that makes a handler of runc's type ours, which nothing but its name tells.

    Raises:
        ShimNotFound: there is none, or it has another name.
    """
    path = shim or shutil.which(PROGRAM, path=PATH)
    if path is None or os.path.basename(path) != PROGRAM:
        raise ShimNotFound(
            f"a handler of the type {RUNC_TYPE} that calls our shim",
            found=f"{path} is not called {PROGRAM}" if path else f"no {PROGRAM} in {PATH}",
            do=f"name it with --shim, by the path of {PROGRAM}",
        )
    return path


def to_preserve(before: Mapping[str, Any], after: Mapping[str, Any]) -> Preserved:
    """What has to be written beside our handler so that all else stays as it is.

    Args:
        before: containerd's dump of the node without us.
        after: that of the node with our handler.
    """
    there = handlers(after)
    lost = {name: each for name, each in handlers(before).items() if name not in there}
    images, changed = (dump.get("plugins", {}).get(IMAGES, {}) for dump in (before, after))
    settings = {
        key: images[key]
        for key in _CONDITIONAL_IMAGE_SETTINGS
        if key in images and images[key] != changed.get(key)
    }
    return Preserved(lost, settings)


def without_replaced(options: Options, view: View, files: Sequence[File]) -> View:
    """The node without the handler whose place ours is to take.

    Args:
        options: what is wanted.
        view: the node without us.
        files: of it.

    Raises:
        EditImpossible: it is written so that it cannot be taken out.
    """
    note = f"nvshim: the handler {options.runtime_name} that stood here comes back with --remove"
    for file in files:
        if file.text is None:
            continue
        text = file.text
        for path in {handlers_path(version) for version in PLUGINS}:
            text = tomltext.cut(text, (*path, options.runtime_name), note)
            at: Any = parse(file.path, text)
            for part in (*path, options.runtime_name):
                at = at.get(part) if isinstance(at, dict) else None
            if at is not None:
                raise _impossible(file.path, tomltext.to_key(*path, options.runtime_name))
        if text != file.text:
            view = view.edited(file.path, text, stood=True)
    return view


def with_handler(
    options: Options,
    containerd: Containerd,
    view: View,
    before: Mapping[str, Any],
    preserved: Preserved = Preserved(),
) -> tuple[View, list[str]]:
    """The node with our parts.

    Args:
        options: what is wanted.
        containerd: the node's.
        view: the node without us, and without whose place ours is to take.
        before: containerd's dump of the node without us.
        kept: what would not stay as it is if it were not written here.
    """
    notes: list[str] = []
    files = load(view, options.config, relative_patterns=containerd.relative_patterns)
    root = files[0]
    version = root.version if root.text is not None else int(before["version"])
    if containerd.merges and root.text is not None and is_of_any_version(root.table):
        version = _MERGED_VERSION
        line = f"version = {version} # by nvshim"
        view = view.edited(root.path, tomltext.insert_line(root.text, 0, line))
    in_options: dict[str, Any] = {}
    if _systemd_cgroup(options, containerd, before):
        in_options["SystemdCgroup"] = True
        if options.runtime_type == RUNTIME_TYPE and containerd.release < _ONLY_CONFIG_PATH:
            path = os.path.join(options.handler_options, f"{options.runtime_name}.toml")
            in_options["ConfigPath"] = path
            view = view.with_text(path, f"{HEAD}SystemdCgroup = true\n")
    tables = list(_tables(options, version, before, in_options, preserved))
    notes += [
        f"containerd does not heed {key} in {options.config} as long as no handler is named there, "
        f"and still will not: the drop-in has {key} = {tomltext.to_value(value)}"
        for key, value in preserved.settings.items()
    ]
    if containerd.merges and version > _NEVER_MERGED:
        return _with_drop_in(options, view, files, version=version, tables=tables), notes
    if options.drop_in is not None:
        raise DropInReplaces(
            f"a drop-in {options.drop_in}",
            found=f"containerd {containerd.release[0]}.{containerd.release[1]} with a "
            f"configuration of version {version}: an imported file replaces all that "
            f"{options.config} says of the CRI plugin",
            do="leave --drop-in out: the handler is then written into the file itself",
        )
    in_force = _in_force(files, version)
    path = in_force.path
    if in_force.generator:
        raise generated(options, in_force, version)
    if path != options.config:
        notes.append(f"the CRI plugin's table is that of {path}: the handler is put there")
    if view.text(path) is None:
        view = view.with_text(path, f"{HEAD}version = {version}\n")
    return _edited(path, view, tables), notes


def _systemd_cgroup(options: Options, containerd: Containerd, before: Mapping[str, Any]) -> bool:
    """Whether the handler's options are to have SystemdCgroup.

    Our shim goes by the name that the kubelet gives a cgroup, and needs no option for it. And what
    containerd 2 takes to be runc's is in the way of some pods where a handler has any: of pods in
    user namespaces, and of those that the shim holds itself.
    """
    if options.systemd_cgroup is not None:
        return options.systemd_cgroup
    if options.runtime_type == RUNTIME_TYPE and containerd.release >= _NO_OPTIONS_NEEDED:
        return False
    plugin, there = cri(before), handlers(before)
    first = (plugin["containerd"].get("default_runtime_name", "runc"), "runc")
    for name in dict.fromkeys((*first, *there)):
        found = there.get(name, {}).get("options", {}).get("SystemdCgroup")
        if isinstance(found, bool):
            return found
    return bool(plugin.get("systemd_cgroup"))


def _tables(
    options: Options,
    version: int,
    before: Mapping[str, Any],
    in_options: Mapping[str, Any],
    preserved: Preserved,
) -> Iterator[_Table]:
    """Our tables with what is in them, the plugin's own first."""
    runtimes = handlers_path(version)
    if options.enable_cdi and not cri(before).get("enable_cdi"):
        yield runtimes[:2], {"enable_cdi": True}
    default = cri(before)["containerd"].get("default_runtime_name")
    settings = dict(preserved.settings)
    if options.set_default and default != options.runtime_name:
        settings["default_runtime_name"] = options.runtime_name
    if settings:
        yield runtimes[:3], settings
    for name, handler in preserved.handlers.items():
        found = pruned(handler)
        more = found.pop("options", {})
        yield (*runtimes, name), found
        if more:
            yield (*runtimes, name, "options"), more
    table: dict[str, Any] = {"runtime_type": options.runtime_type}
    if options.shim is not None:
        table["runtime_path"] = options.shim
    if options.container_annotations:
        table["container_annotations"] = list(options.container_annotations)
    if options.pod_annotations:
        table["pod_annotations"] = list(options.pod_annotations)
    yield (*runtimes, options.runtime_name), table
    if in_options:
        yield (*runtimes, options.runtime_name, "options"), dict(in_options)


def _body(tables: Sequence[_Table]) -> str:
    """Tables as TOML, without the end of the last line."""
    lines = []
    for path, values in tables:
        lines.append(f"[{tomltext.to_key(*path)}]")
        lines += [f"  {tomltext.to_key(k)} = {tomltext.to_value(v)}" for k, v in values.items()]
    return "\n".join(lines)


def _with_drop_in(
    options: Options,
    view: View,
    files: Sequence[File],
    *,
    version: int,
    tables: Sequence[_Table],
) -> View:
    root = files[0]
    path = drop_in_place(options, root) or options.drop_in or default_drop_in(options)
    there = view.text(path)
    if there is not None and not options.force:
        raise NotOurs(
            f"to write the drop-in {path}", found="there is a file of somebody else",
            do="choose another place with --drop-in, or overwrite it with --force",
        )  # fmt: skip
    if not any(covers(file, path) for file in files):
        if root.text is None:
            view = view.with_text(root.path, f"{HEAD}version = {version}\n")
        text = view.text(root.path) or ""
        imports = [*root.table.get("imports", []), path]
        new = _with_import(text, path)
        _expect(root.path, new, {**parse(root.path, text), "imports": imports})
        view = view.edited(root.path, new)
    return view.with_text(path, f"{HEAD}version = {version}\n\n{_body(tables)}\n")


def _with_import(text: str, path: str) -> str:
    """The root file with an import."""
    value = imports_value(text)
    if value is not None:
        return tomltext.insert_element(text, value, path)
    line = f"imports = [{tomltext.to_value(path)}] # by nvshim"
    return tomltext.insert_line(text, _top(text), line)


def _top(text: str) -> int:
    """Where a key of no table may stand: behind the version, or before everything."""
    for statement in tomltext.statements(text):
        if statement.path == ("version",) and statement.key:
            return statement.end
    return 0


def _in_force(files: Sequence[File], version: int) -> File:
    """The file whose table of the plugin containerd 1.x takes."""
    for file in reversed(files):
        if PLUGINS[version] in file.table.get("plugins", {}):
            return file
    return files[0]


def _edited(path: str, view: View, tables: Sequence[_Table]) -> View:
    """A file with our parts: values that are changed where they are, and tables in a block."""
    text, rest = view.text(path) or "", []
    new = text
    for table, values in tables:
        if "default_runtime_name" in values or "enable_cdi" in values:
            ((key, value),) = values.items()
            changed = tomltext.set_value(new, table, key, value)
            if changed is not None:
                view, new = view.edited(path, changed), changed
                continue
        rest.append((table, values))
    new = tomltext.append(new, f"{_BEGIN}\n{_body(rest)}\n{_END}")
    desired = parse(path, text)
    for table, values in tables:
        at: Any = desired
        for part in table:
            at = at.setdefault(part, {})
            if not isinstance(at, dict):
                raise _impossible(path, tomltext.to_key(*table))
        at.update(values)
    _expect(path, new, desired)
    return view.edited(path, new)


def _expect(path: str, text: str, desired: Mapping[str, Any]) -> None:
    """That a text says what it should, and nothing else."""
    try:
        found = tomltext.parse(text)
    except tomllib.TOMLDecodeError as error:
        raise _impossible(path, str(error)) from error
    for difference in differences({"": found}, {"": dict(desired)}):
        raise _impossible(path, tomltext.to_key(*difference[1:]))


def _impossible(path: str, what: str) -> EditImpossible:
    return EditImpossible(
        f"to add to {path}",
        found=f"it is written so that nothing can be added beside it: {what}",
        do="write inline tables ({ … }) of the CRI plugin as tables of their own ([ … ])",
    )
