"""Writing a plan into an OCI spec.

:func:`apply` is pure: it returns a new spec and leaves the old one as it was. What it does not
know survives untouched. What is there already is not added again, so that a second pass
changes nothing:

==========  ============================  ====================================================
edit        added to                      is there already if
==========  ============================  ====================================================
device      linux.devices                 a node has the same path, type and numbers
            linux.resources.devices       a rule allows it after the last rule that denies
            mounts, not linux.devices     in a user namespace, if the node is elsewhere on the
                                          host: a runtime makes no nodes there
mount       mounts                        a mount has the same destination (the user's wins)
variable    process.env                   its last value is the same
group       process.user.additionalGids   it is listed
hook        hooks.KIND                    the same hook is listed
control     linux.intelRdt                there is any (the user's wins)
interface   linux.netDevices              the interface is moved already (the user's wins)
==========  ============================  ====================================================

One thing is taken out: NVIDIA's own hook (:func:`hooks.requests.glance.is_nvidia_hook`), which
Docker's ``--gpus`` adds, and NVIDIA's legacy runtime; it would do again what is done here.

Hooks, resource control and interfaces come of foreign CDI specs alone.

A device is in both lists, because whoever rebuilds the cgroup later (systemd on daemon-reload,
an update of resources) rebuilds it from the spec.

:mod:`hooks.edits.verification` believes nothing of that.

Source: OCI runtime specification, config.md and config-linux.md.
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Any, TypeAlias

from hooks.edits.entries import (
    RULED_KINDS,
    device_node,
    device_rule,
    hook_entry,
    mount_entry,
    mounted_node,
    moved_interfaces,
    resource_control,
)
from hooks.errors import DeviceConflict, MalformedSpec
from hooks.requests.glance import HOOK_LISTS, has_nvidia_hook, is_nvidia_hook
from hooks.requests.policy import has_user_namespace

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from hooks.edits.plan import Device, Hook, Plan

    Json: TypeAlias = dict[str, Any]

__all__ = ["apply", "apply_process"]


def apply(spec: Mapping[str, Any], plan: Plan) -> Json:
    """The spec with a plan's edits.

    Args:
        spec: config.json, decoded. It is not changed.
        plan: the edits. Its links and libraries are files, and none of this function's.

    Returns:
        A new spec that shares what has not changed with the old one.

    Raises:
        MalformedSpec: a part that is to be edited has the wrong shape.
        DeviceConflict: the spec has another device at the path of one of the plan's.
    """
    edited = dict(spec)
    if has_nvidia_hook(spec):
        edited["hooks"] = {
            name: [hook for hook in entries if not is_nvidia_hook(hook)]
            if name in HOOK_LISTS and isinstance(entries, list)
            else entries
            for name, entries in spec["hooks"].items()
        }
    process = _object(spec, "process")
    if process:
        edited["process"] = apply_process(process, plan.environment, plan.additional_gids)
    mounted = _mounted_nodes(spec, plan.devices)
    if plan.mounts or mounted:
        mounts = _list(spec, "mounts")
        there = {_destination(mount) for mount in mounts}
        edited["mounts"] = mounts + [
            entry
            for entry in (*map(mount_entry, plan.mounts), *mounted.values())
            if posixpath.normpath(entry["destination"]) not in there
        ]
    if plan.devices:
        edited["linux"] = _apply_devices(_object(spec, "linux"), plan.devices, mounted)
    if plan.hooks:
        edited["hooks"] = _apply_hooks(_object(edited, "hooks"), plan.hooks)
    if plan.intel_rdt:
        linux = _object(edited, "linux")
        edited["linux"] = {"intelRdt": resource_control(plan.intel_rdt[-1]), **linux}
    if plan.net_devices:
        linux = _object(edited, "linux")
        moved = moved_interfaces(plan.net_devices) | _object(linux, "netDevices", "linux.")
        edited["linux"] = {**linux, "netDevices": moved}
    return edited


def apply_process(
    process: Mapping[str, Any],
    environment: Iterable[tuple[str, str]],
    additional_gids: Iterable[int],
) -> Json:
    """A process, of init or of an exec, with variables and groups added.

    Args:
        process: the OCI process, decoded. It is not changed.
        environment: variables with their values.
        additional_gids: supplementary groups.

    Returns:
        A new process.

    Raises:
        MalformedSpec: a part that is to be edited has the wrong shape.
    """
    edited = dict(process)
    entries = _list(process, "env", "process.")
    # The last entry of a name is the one that the process sees.
    now = dict(str(entry).partition("=")[::2] for entry in entries)
    added = [f"{name}={value}" for name, value in environment if now.get(name) != value]
    if added:
        edited["env"] = entries + added
    user = _object(process, "user", "process.")
    gids = _list(user, "additionalGids", "process.user.")
    wanted = [gid for gid in additional_gids if gid not in gids and gid != user.get("gid")]
    if wanted:
        edited["user"] = {**user, "additionalGids": gids + wanted}
    return edited


def _mounted_nodes(spec: Mapping[str, Any], devices: Iterable[Device]) -> dict[str, Json]:
    """The mounts that stand for devices, by the path of each."""
    if not has_user_namespace(spec):
        return {}
    found = {device.path: mounted_node(device) for device in devices}
    return {path: entry for path, entry in found.items() if entry is not None}


def _apply_devices(linux: Json, devices: Iterable[Device], mounted: Collection[str]) -> Json:
    nodes = _list(linux, "devices", "linux.")
    resources = _object(linux, "resources", "linux.")
    rules = _list(resources, "devices", "linux.resources.")
    by_path = {_text(node, "path"): node for node in nodes}
    allowed = _allowed(rules)
    new_nodes, new_rules = [], []
    for device in devices:
        other = by_path.get(device.path)
        if other is None and device.path in mounted:
            pass  # it is no node that the runtime makes
        elif other is None:
            by_path[device.path] = device_node(device)
            new_nodes.append(by_path[device.path])
        elif not _is_same(other, device):
            raise DeviceConflict(
                f"{device.path} ({device.reason})",
                found=f"the container has another device there, "
                f"{other.get('major')}:{other.get('minor')}",
                do="leave the path free",
            )
        has_rule = device.kind in RULED_KINDS and device.access
        if has_rule and (device.kind, device.major, device.minor, device.access) not in allowed:
            new_rules.append(device_rule(device))
    return {
        **linux,
        "devices": nodes + new_nodes,
        "resources": {**resources, "devices": rules + new_rules},
    }


def _apply_hooks(hooks: Json, wanted: Iterable[Hook]) -> Json:
    edited = dict(hooks)
    for hook in wanted:
        there = _list(edited, hook.kind, "hooks.")
        entry = hook_entry(hook)
        if entry not in there:
            edited[hook.kind] = [*there, entry]
    return edited


def _allowed(rules: Iterable[Any]) -> set[tuple[Any, Any, Any, Any]]:
    """The devices that single rules allow after the last rule that denies."""
    allowed: set[tuple[Any, Any, Any, Any]] = set()
    for rule in rules:
        if not isinstance(rule, dict) or not rule.get("allow"):
            allowed.clear()
        else:
            what = (rule.get("type"), rule.get("major"), rule.get("minor"), rule.get("access"))
            if all(isinstance(part, int | str) for part in what) and what[0] in RULED_KINDS:
                allowed.add(what)
    return allowed


def _is_same(node: Mapping[str, Any], device: Device) -> bool:
    # "u" is the unbuffered character device of POSIX; Linux makes no difference.
    kind = "c" if node.get("type") == "u" else node.get("type")
    if kind == "p":
        return device.kind == kind
    numbers = node.get("major"), node.get("minor")
    return kind == device.kind and numbers == (device.major, device.minor)


def _destination(mount: Any) -> str:
    return posixpath.normpath(_text(mount, "destination"))


def _text(entry: Any, name: str) -> str:
    value = entry.get(name) if isinstance(entry, dict) else None
    if not isinstance(value, str):
        raise MalformedSpec(
            f"{name} of an entry of config.json", found=f"{value!r} instead of a string"
        )
    return value


def _object(parent: Mapping[str, Any], name: str, where: str = "") -> Json:
    value = parent.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise MalformedSpec(f"{where}{name} of config.json", found="it is no object")
    return value


def _list(parent: Mapping[str, Any], name: str, where: str = "") -> list[Any]:
    value = parent.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise MalformedSpec(f"{where}{name} of config.json", found="it is no list")
    return value
