"""Check a configuration before it is written: what prevents it, and what it would change.

See :mod:`integration.engines.containerd` for the rules.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from integration import tomltext
from integration.engines.cri_trial import cri_fault
from integration.engines.effective_config import CRI, Containerd, cri, differences, handlers, pruned
from integration.engines.errors import (
    ConfigDiffers,
    ConfigGenerated,
    ConfigIgnored,
    ConfigRefused,
    CriDisabled,
    EnginesError,
    HandlerInUse,
    HandlerTaken,
    SandboxerUnsafe,
)
from integration.engines.imports import GENERATED, K0S, MICROK8S, File, load
from integration.engines.options import PLUGINS, Options, drop_in_place, handlers_path
from integration.engines.undo import View
from integration.handlers import (
    RUNC_TYPE,
    RUNTIME_TYPE,
    SURVIVES_SANDBOXER,
    calls_our_shim,
    parse_release,
)

_TEMPLATE: Final = ".tmpl"
_NVIDIA_RUNTIME: Final = "nvidia-container-runtime"


def refuse_generated(options: Options, files: Sequence[File], *, merges: bool) -> None:
    """Refuse a root file that its generator rewrites at each start, unless it imports drop-ins.

    k0s regenerates the imports too, so it is always refused.
    """
    root = files[0]
    is_imported = merges and root.text is not None and drop_in_place(options, root) is not None
    if root.generator == K0S or (root.generator and root.text is not None and not is_imported):
        version = root.version if root.text is not None else 3 if merges else 2
        raise generated(options, root, version)


def refuse_template(options: Options) -> None:
    """Refuse a template of k3s or RKE2: it is not TOML, and a new one replaces the built-in one."""
    root = options.config
    if not root.endswith(_TEMPLATE):
        return
    version = 3 if "-v3" in os.path.basename(root) else 2
    raise ConfigGenerated(
        f"a handler in {root}",
        found="it is a template of k3s or RKE2, which nvshim does not edit",
        do=f"add by hand: {_base(root)}{_one_line(options, version)}; or pass the file that is "
        f"generated from it with --config {root.removesuffix(_TEMPLATE)}",
    )


def _base(template: str) -> str:
    """Return the first line that a new k3s template needs; empty if the template exists."""
    return "" if os.path.exists(template) else 'a first line {{ template "base" . }}, then '


def generated(options: Options, file: File, version: int) -> EnginesError:
    """Return the error for a file that is regenerated at each start, with the right file to edit.

    Args:
        options: the desired configuration.
        file: the generated file.
        version: the version of the configuration.
    """
    directory = os.path.dirname(file.path)
    lines = _one_line(options, version)
    found = f"{file.generator} regenerates it at each start"
    if file.generator == K0S:
        place = os.path.join(os.path.dirname(options.config), "containerd.d", "nvshim.toml")
        do = f"put into {place}: version = {version}, then {lines}; and restart k0s"
    elif file.generator == MICROK8S:
        do = f"use --config {os.path.join(directory, 'containerd-template.toml')}"
    else:
        template = GENERATED.search(file.text or "")
        path = os.path.join(directory, template[2] if template else "")
        found += ", and it imports no directory that merges with its own sections"
        do = f"put into {path}: {_base(path)}{lines}"
    return ConfigGenerated(f"a handler in {file.path}", found=found, do=do)


def _one_line(options: Options, version: int) -> str:
    table = tomltext.to_key(*handlers_path(version), options.runtime_name)
    told = f'[{table}] with runtime_type = "{options.runtime_type or RUNTIME_TYPE}"'
    return f'{told} and runtime_path = "{options.shim}"' if options.shim else told


def check_previous(options: Options, view: View, before: Mapping[str, Any]) -> None:
    """Check that a handler can be added to this node at all.

    Args:
        options: the desired configuration.
        view: the node without our changes.
        before: the result of containerd's config dump for that node.

    Raises:
        CriDisabled: the CRI plugin is disabled, so no pod would use the handler.
        HandlerTaken: a handler with that name already exists.
    """
    disabled = before.get("disabled_plugins", [])
    if any(name in disabled for name in ("cri", *CRI)) or not cri(before):
        raise CriDisabled(
            f"a handler of the CRI plugin in {options.config}",
            found="disabled_plugins lists the CRI plugin",
            do="remove it from that list if a kubelet uses this containerd; "
            "Docker and ctr need no handler",
        )
    taken = handlers(before).get(options.runtime_name)
    if taken is None:
        return
    file = _file_with_handler(options, view)
    where = "" if file is None else file.path
    if file is not None and file.generator:
        raise ConfigGenerated(
            f"to replace the handler {options.runtime_name} in {where}",
            found=f"{file.generator} regenerates it at each start",
            do="choose another --runtime-name, such as nvshim",
        )
    if where and options.replace:
        return
    raise HandlerTaken(
        f"the handler {options.runtime_name}",
        found=f"{where or 'containerd itself'} has one that calls {_target(taken)}",
        do="add --replace to replace it (--remove restores it), or choose another "
        "--runtime-name" if where else "choose another --runtime-name",
    )  # fmt: skip


def other_nvidia_handlers(options: Options, before: Mapping[str, Any]) -> list[str]:
    """Return notes on the other handlers that still call NVIDIA's runtime.

    Args:
        options: the desired configuration.
        before: containerd's dump of the node without our changes.
    """
    return [
        f"the handler {name} still calls {_target(handler)}"
        for name, handler in handlers(before).items()
        if name != options.runtime_name and _NVIDIA_RUNTIME in _target(handler)
    ]


def _target(handler: Mapping[str, Any]) -> str:
    """Return the program or runtime type that a handler calls."""
    names = (handler.get("options", {}).get("BinaryName"), handler.get("runtime_path"))
    return str(next(filter(None, names), handler.get("runtime_type")))


def _file_with_handler(options: Options, view: View) -> File | None:
    for file in reversed(load(view, options.config)):
        for plugin in PLUGINS.values():
            table: Any = file.table.get("plugins", {}).get(plugin, {})
            if options.runtime_name in table.get("containerd", {}).get("runtimes", {}):
                return file
    return None


def check(
    options: Options, containerd: Containerd, before: Mapping[str, Any], after: Mapping[str, Any]
) -> None:
    """Check that containerd reads what we wrote, and reads everything else as before."""
    handler = handlers(after).get(options.runtime_name, {})
    meant = {"a handler": handler.get("runtime_type") == options.runtime_type}
    if options.shim is not None:
        meant["runtime_path (--shim)"] = handler.get("runtime_path") == options.shim
    if options.enable_cdi:
        meant["enable_cdi"] = cri(after).get("enable_cdi") is True
    if options.set_default:
        default = cri(after)["containerd"].get("default_runtime_name")
        meant["default_runtime_name"] = default == options.runtime_name
    for what, seen in meant.items():
        if not seen:
            version = load(View(), options.config)[0].version
            raise ConfigIgnored(
                f"{what} in {options.config}",
                found=f"{containerd} does not read it from a configuration of version {version}",
                do="see `containerd config migrate`, or update containerd; if another containerd "
                "reads this file, name its program with --containerd",
            )
    for path in differences(pruned(before), pruned(after)):
        if not _is_ours(options, path):
            raise ConfigDiffers(
                f"to add only our table to {options.config}",
                found=f"containerd would read {tomltext.to_key(*path)} differently",
                do="run `containerd config migrate`, review its output and use that file",
            )


def check_default(
    options: Options, now: Mapping[str, Any] | None, after: Mapping[str, Any]
) -> None:
    """Check that pods without a runtime class still have a handler after a removal.

    Raises:
        HandlerInUse: the removed handler is the default, and nvshim did not make it so.
    """
    name = cri(after).get("containerd", {}).get("default_runtime_name")
    if options.force or now is None or name in handlers(after) or name not in handlers(now):
        return
    raise HandlerInUse(
        f"to remove the handler {name}",
        found=f"{options.config} or a file that it imports sets default_runtime_name = {name}, "
        "which nvshim did not write; without the handler no pod would start",
        do="set default_runtime_name to another handler first, such as runc; --force removes the "
        "handler anyway",
    )


def check_default_exists(options: Options, after: Mapping[str, Any]) -> None:
    """Check that the default handler exists; the CRI plugin does not start without it.

    Raises:
        ConfigRefused: the default handler does not exist.
    """
    name = cri(after)["containerd"].get("default_runtime_name")
    if options.force or not name or name in handlers(after):
        return
    there = ", ".join(sorted(handlers(after)))
    raise ConfigRefused(
        f"the configuration in {options.config}",
        found=f"default_runtime_name is {name}, and there is no such handler ({there}); "
        "containerd's CRI plugin would not start",
        do=f"add the handler {name}, set default_runtime_name to another one, or make "
        f"{options.runtime_name} the default with --set-default; --force continues anyway",
    )


def check_cri_starts(options: Options, containerd: Containerd, after: Mapping[str, Any]) -> None:
    """Check that the CRI plugin starts with a configuration, where that can be tried.

    Raises:
        ConfigRefused: it does not.
    """
    if options.force or not (fault := cri_fault(containerd, after)):
        return
    raise ConfigRefused(
        f"the configuration in {options.config}",
        found=f"containerd's CRI plugin would not start with it, and no pod either: {fault}",
        do="correct that setting in this file or one that it imports; --force continues anyway",
    )


def check_sandboxer(options: Options, containerd: Containerd, after: Mapping[str, Any]) -> None:
    """Check that no handler of ours creates sandboxes on a containerd that crashes because of it.

    Raises:
        SandboxerUnsafe: one of them does.
    """
    release = parse_release(containerd.version)
    if options.force or release is None or release >= SURVIVES_SANDBOXER:
        return
    for name, handler in handlers(after).items():
        kind = handler.get("runtime_type")
        if handler.get("sandboxer") != "shim" or kind == RUNC_TYPE:
            continue
        if calls_our_shim(kind, handler.get("runtime_path")):
            raise SandboxerUnsafe(
                f'the handler {name} with sandboxer = "shim"',
                found=f"{containerd} can crash with it; one pod with host networking is enough",
                do=f'remove sandboxer = "shim" from the handler {name}, or update containerd to '
                "2.3.0 or later; --force continues anyway",
            )


def _is_ours(options: Options, path: tuple[str, ...]) -> bool:
    allowed: list[tuple[str, ...]] = [("containerd", "runtimes", options.runtime_name)]
    if options.set_default:
        allowed.append(("containerd", "default_runtime_name"))
    if options.enable_cdi:
        allowed.append(("enable_cdi",))
    return path[:1] == ("plugins",) and any(path[2 : 2 + len(a)] == a for a in allowed)
