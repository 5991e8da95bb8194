"""A node with our handler: the tables, and the files that contain them.

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
from integration.engines.errors import (
    DropInReplaces,
    EditImpossible,
    EnginesError,
    NotOurs,
    ShimNotFound,
)
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

_NEVER_MERGED: Final = 1  # a release that merges does not import a file of this version
_MERGED_VERSION: Final = 3  # every release that merges reads this version

# containerd 1.6 passes no handler options to a shim that it does not know, except this path.
_ONLY_CONFIG_PATH: Final = (1, 7)

_NO_OPTIONS_NEEDED: Final = (2, 0)

# containerd 2 applies these settings of a version 2 file to its images plugin only if the file
# names a handler. With ours it would start to apply them, and one may be a snapshotter that this
# node lacks.
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
    """Settings that containerd would read differently only because a handler is named."""

    handlers: Mapping[str, Any] = field(default_factory=dict)  # built-in ones that it would drop
    # of the images plugin, with the values before our change
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether there is anything to preserve."""
        return bool(self.handlers or self.settings)


def with_earlier_choices(
    options: Options, before: Mapping[str, Any], now: Mapping[str, Any] | None
) -> Options:
    """Return the options, with unset ones taken from our earlier configuration.

    Args:
        options: the options of this call.
        before: containerd's dump of the node without our changes.
        now: the dump of the node as it is; None if containerd would not start.

    Raises:
        ShimNotFound: the handler gets runc's type, but no path to our shim is known.
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
    """Return where an earlier call wrote the drop-in; None for nowhere or the default place."""
    for path, written in record.files.items():
        has_handler = tomltext.to_key("runtimes", record.name) in written.after
        if has_handler and not written.edits and path != default_drop_in(options):
            return path
    return None


def _is_ours(handler: Mapping[str, Any]) -> bool:
    return calls_our_shim(handler.get("runtime_type"), handler.get("runtime_path"))


def _shim_for_runc_type(shim: str | None) -> str:
    """Return the path by which a handler of runc's type uses our shim, if the program has our name.

    Raises:
        ShimNotFound: there is no such program, or it has another name.
    """
    path = shim or shutil.which(PROGRAM, path=PATH)
    if path is None or os.path.basename(path) != PROGRAM:
        raise ShimNotFound(
            f"a handler of the type {RUNC_TYPE} that calls our shim",
            found=f"{path} is not called {PROGRAM}" if path else f"no {PROGRAM} in {PATH}",
            do=f"pass the path of {PROGRAM} with --shim",
        )
    return path


def to_preserve(before: Mapping[str, Any], after: Mapping[str, Any]) -> Preserved:
    """Return what to write with our handler so that everything else stays as it is.

    Args:
        before: containerd's dump of the node without our changes.
        after: its dump of the node with our handler.
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
    """Return the node without the handler that ours replaces.

    Args:
        options: the desired configuration.
        view: the node without our changes.
        files: its configuration files.

    Raises:
        EditImpossible: the handler is written in a form that cannot be removed from the text.
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
    """Return the node with our changes, and notes for the user.

    Args:
        options: the desired configuration.
        containerd: the node's containerd.
        view: the node without our changes and without the handler that ours replaces.
        before: containerd's dump of the node without our changes.
        preserved: settings to repeat so that they stay as they are.
    """
    notes: list[str] = []
    files = load(view, options.config, relative_patterns=containerd.relative_patterns)
    root = files[0]
    version = root.version if root.text is not None else int(before["version"])
    if containerd.merges and root.text is not None and is_of_any_version(root.table):
        version = _MERGED_VERSION
        line = f"version = {version} # by nvshim"
        view = view.edited(root.path, tomltext.insert_line(root.text, 0, line))
    view, in_options = _with_options(options, containerd, view, before)
    tables = list(_tables(options, version, before, in_options, preserved))
    notes += [
        f"containerd ignores {key} in {options.config} because no handler is named there; to keep "
        f"it that way, the drop-in sets {key} = {tomltext.to_value(value)}"
        for key, value in preserved.settings.items()
    ]
    if containerd.merges and version > _NEVER_MERGED:
        return _with_drop_in(options, view, files, version=version, tables=tables), notes
    if options.drop_in is not None:
        raise DropInReplaces(
            f"a drop-in {options.drop_in}",
            found=f"containerd {containerd.release[0]}.{containerd.release[1]} with a "
            f"configuration of version {version}: an imported file replaces everything that "
            f"{options.config} sets for the CRI plugin",
            do="leave --drop-in out: nvshim then writes the handler into the file itself",
        )
    in_force = _in_force(files, version)
    path = in_force.path
    if in_force.generator:
        raise generated(options, in_force, version)
    if path != options.config:
        notes.append(f"the CRI plugin's table in effect is in {path}: the handler goes there")
    if view.text(path) is None:
        view = view.with_text(path, f"{HEAD}version = {version}\n")
    return _edited(path, view, tables), notes


def _with_options(
    options: Options, containerd: Containerd, view: View, before: Mapping[str, Any]
) -> tuple[View, dict[str, Any]]:
    """Return the handler's options, and the node with the file that containerd 1.6 needs."""
    in_options: dict[str, Any] = {}
    if _systemd_cgroup(options, containerd, before):
        in_options["SystemdCgroup"] = True
        if options.runtime_type == RUNTIME_TYPE and containerd.release < _ONLY_CONFIG_PATH:
            path = os.path.join(options.handler_options, f"{options.runtime_name}.toml")
            in_options["ConfigPath"] = path
            view = view.with_text(path, f"{HEAD}SystemdCgroup = true\n")
    return view, in_options


def _systemd_cgroup(options: Options, containerd: Containerd, before: Mapping[str, Any]) -> bool:
    """Whether to set SystemdCgroup in the handler's options.

    Our shim follows the form of the cgroup name from the kubelet and needs no option. containerd 2
    treats any options as runc's, which breaks pods in user namespaces and pods whose sandbox the
    shim creates.
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
    """Yield our tables and their values; the plugin's own come first."""
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
    """Return the tables as TOML, without a final newline."""
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
            f"to write the drop-in {path}", found="the file exists and nvshim did not write it",
            do="choose another path with --drop-in, or overwrite the file with --force",
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
    """Return the root file's text with one more import."""
    value = imports_value(text)
    if value is not None:
        return tomltext.insert_element(text, value, path)
    line = f"imports = [{tomltext.to_value(path)}] # by nvshim"
    return tomltext.insert_line(text, _top(text), line)


def _top(text: str) -> int:
    """Return where a top-level key can go: after the version, or at the start."""
    for statement in tomltext.statements(text):
        if statement.path == ("version",) and statement.key:
            return statement.end
    return 0


def _in_force(files: Sequence[File], version: int) -> File:
    """Return the file whose plugin table containerd 1.x uses."""
    for file in reversed(files):
        if PLUGINS[version] in file.table.get("plugins", {}):
            return file
    return files[0]


def _edited(path: str, view: View, tables: Sequence[_Table]) -> View:
    """Return a view with our values set in place and our tables in a block."""
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
    """Check that a text parses to exactly the expected values."""
    try:
        found = tomltext.parse(text)
    except tomllib.TOMLDecodeError as error:
        raise _impossible(path, str(error)) from error
    for difference in differences({"": found}, {"": dict(desired)}):
        raise _impossible(path, tomltext.to_key(*difference[1:]))


def _impossible(path: str, what: str) -> EnginesError:
    return EditImpossible(
        f"to add to {path}",
        found=f"it is written in a form that cannot be extended: {what}",
        do="write inline tables ({ … }) of the CRI plugin as tables of their own ([ … ])",
    )
