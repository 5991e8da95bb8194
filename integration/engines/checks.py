"""Whether a configuration may be put in place: what stands in its way, and what it would do.

See :mod:`integration.engines.containerd` for the rules.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from integration import tomltext
from integration.engines.effective_config import CRI, Containerd, cri, differences, handlers, pruned
from integration.engines.errors import (
    ConfigDiffers,
    ConfigGenerated,
    ConfigIgnored,
    ConfigRefused,
    CriDisabled,
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
    """A root file that is written anew at each start keeps nothing of ours, but its imports.

    k0s writes the imports as well.
    """
    root = files[0]
    is_imported = merges and root.text is not None and drop_in_place(options, root) is not None
    if root.generator == K0S or (root.generator and root.text is not None and not is_imported):
        version = root.version if root.text is not None else 3 if merges else 2
        raise generated(options, root, version)


def refuse_template(options: Options) -> None:
    """A template of k3s or RKE2 is no TOML, and one that is made replaces all of their own."""
    root = options.config
    if not root.endswith(_TEMPLATE):
        return
    version = 3 if "-v3" in os.path.basename(root) else 2
    raise ConfigGenerated(
        f"a handler in {root}",
        found="it is a template of k3s or RKE2, which nvshim does not edit",
        do=f"add by hand: {_base(root)}{_one_line(options, version)}; or name with --config the "
        f"file that is made of it, {root.removesuffix(_TEMPLATE)}",
    )


def _base(template: str) -> str:
    """What a template of k3s begins with that is not there yet."""
    return "" if os.path.exists(template) else 'a first line {{ template "base" . }}, then '


def generated(options: Options, file: File, version: int) -> ConfigGenerated:
    """The error of a file that is written anew at each start: where the handler belongs instead.

    Args:
        options: what is wanted.
        file: the file.
        version: of the configuration.
    """
    directory = os.path.dirname(file.path)
    lines = _one_line(options, version)
    found = f"{file.generator} writes it anew at each start"
    if file.generator == K0S:
        place = os.path.join(os.path.dirname(options.config), "containerd.d", "nvshim.toml")
        do = f"put into {place}: version = {version}, then {lines}; and restart k0s"
    elif file.generator == MICROK8S:
        do = f"use --config {os.path.join(directory, 'containerd-template.toml')}"
    else:
        template = GENERATED.search(file.text or "")
        path = os.path.join(directory, template[2] if template else "")
        found += ", and it imports nothing that would leave its sections whole"
        do = f"put into {path}: {_base(path)}{lines}"
    return ConfigGenerated(f"a handler in {file.path}", found=found, do=do)


def _one_line(options: Options, version: int) -> str:
    table = tomltext.to_key(*handlers_path(version), options.runtime_name)
    told = f'[{table}] with runtime_type = "{options.runtime_type or RUNTIME_TYPE}"'
    return f'{told} and runtime_path = "{options.shim}"' if options.shim else told


def check_previous(options: Options, view: View, before: Mapping[str, Any]) -> None:
    """See that a handler can be added to a node at all.

    Args:
        options: what is wanted.
        view: the node without us.
        before: containerd's dump of it.

    Raises:
        CriDisabled: nobody would use it.
        HandlerTaken: somebody else has one of that name.
    """
    disabled = before.get("disabled_plugins", [])
    if any(name in disabled for name in ("cri", *CRI)) or not cri(before):
        raise CriDisabled(
            f"a handler of the CRI plugin in {options.config}",
            found="disabled_plugins has the plugin",
            do="take it out of there if a kubelet is to use this containerd; "
            "Docker and ctr need no handler",
        )
    taken = handlers(before).get(options.runtime_name)
    if taken is None:
        return
    file = _file_with_handler(options, view)
    where = "" if file is None else file.path
    if file is not None and file.generator:
        raise ConfigGenerated(
            f"to take the place of the handler {options.runtime_name} in {where}",
            found=f"{file.generator} writes it anew at each start",
            do="choose another --runtime-name, such as nvshim",
        )
    if where and options.replace:
        return
    raise HandlerTaken(
        f"the handler {options.runtime_name}",
        found=f"{where or 'containerd itself'} has one that calls {_target(taken)}",
        do="add --replace to take its place (--remove puts it back), or choose another "
        "--runtime-name" if where else "choose another --runtime-name",
    )  # fmt: skip


def other_nvidia_handlers(options: Options, before: Mapping[str, Any]) -> list[str]:
    """What a person should know who replaces NVIDIA's handler: which others are NVIDIA's.

    Args:
        options: what is wanted.
        before: containerd's dump of the node without us.
    """
    return [
        f"the handler {name} still calls {_target(handler)}"
        for name, handler in handlers(before).items()
        if name != options.runtime_name and _NVIDIA_RUNTIME in _target(handler)
    ]


def _target(handler: Mapping[str, Any]) -> str:
    """What a handler calls."""
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
    """That containerd reads what was meant, and nothing else otherwise."""
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
                do="see `containerd config migrate`, or update containerd; if another one is to "
                "read it, name that with --containerd",
            )
    for path in differences(pruned(before), pruned(after)):
        if not _is_ours(options, path):
            raise ConfigDiffers(
                f"to add nothing but our own table to {options.config}",
                found=f"containerd would read {tomltext.to_key(*path)} differently",
                do="see what `containerd config migrate` makes of the file, and use that",
            )


def check_default(
    options: Options, now: Mapping[str, Any] | None, after: Mapping[str, Any]
) -> None:
    """That pods which name no handler have one, if they have one now.

    Raises:
        HandlerInUse: it is ours that goes, and somebody else has made it the default.
    """
    name = cri(after).get("containerd", {}).get("default_runtime_name")
    if options.force or now is None or name in handlers(after) or name not in handlers(now):
        return
    raise HandlerInUse(
        f"to take the handler {name} away",
        found=f"{options.config}, or what it imports, has default_runtime_name = {name}, "
        "and nvshim has not written that: no pod would start",
        do="give it another value first, such as runc; --force removes the handler anyway",
    )


def check_default_exists(options: Options, after: Mapping[str, Any]) -> None:
    """See that the handler of pods which name none is there, or the CRI plugin does not start.

    Raises:
        ConfigRefused: it is not.
    """
    name = cri(after)["containerd"].get("default_runtime_name")
    if options.force or not name or name in handlers(after):
        return
    there = ", ".join(sorted(handlers(after)))
    raise ConfigRefused(
        f"the configuration in {options.config}",
        found=f"default_runtime_name is {name}, and there is no such handler ({there}): "
        "containerd's CRI plugin would not start",
        do=f"add the handler {name}, name another in default_runtime_name, or make "
        f"{options.runtime_name} the default with --set-default; --force goes on anyway",
    )


def check_sandboxer(options: Options, containerd: Containerd, after: Mapping[str, Any]) -> None:
    """See that no handler of ours makes sandboxes for a containerd that ends by it.

    Raises:
        SandboxerUnsafe: one does.
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
                found=f"{containerd} can end with it: a pod with the node's network is enough",
                do=f'take sandboxer = "shim" from the handler {name}, or update containerd to '
                "2.3.0 or later; --force goes on anyway",
            )


def _is_ours(options: Options, path: tuple[str, ...]) -> bool:
    allowed: list[tuple[str, ...]] = [("containerd", "runtimes", options.runtime_name)]
    if options.set_default:
        allowed.append(("containerd", "default_runtime_name"))
    if options.enable_cdi:
        allowed.append(("enable_cdi",))
    return path[:1] == ("plugins",) and any(path[2 : 2 + len(a)] == a for a in allowed)
