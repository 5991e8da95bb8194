"""Write a plan into an OCI spec.

:func:`apply` is pure: it returns a new spec and keeps unknown parts. It does not add what is
already there, so a second pass changes nothing:

==========  ============================  ====================================================
edit        added to                      is already there if
==========  ============================  ====================================================
device      linux.devices                 a node has the same path, type and numbers
            linux.resources.devices       a rule allows it after the last rule that denies
            mounts, not linux.devices     in a user namespace, if the node is elsewhere on the
                                          host: a runtime makes no nodes there
mount       mounts                        a mount has the same destination (the user's wins)
variable    process.env                   its last value is the same; of some, any (UNLESS_SET)
group       process.user.additionalGids   it is listed
hook        hooks.KIND                    the same hook is listed
control     linux.intelRdt                one is set (the user's wins)
interface   linux.netDevices              the interface is moved already (the user's wins)
==========  ============================  ====================================================

It removes two things that engines add: NVIDIA's hooks, from any list
(:mod:`hooks.requests.oci_hooks`), because the engine does their work; and the mounts of files that
a layer of the image contains (:mod:`hooks.edits.applied`).

Hooks, resource control and interfaces come from foreign CDI specs only.

A device goes into both lists, because a later rebuild of the cgroup (by systemd on daemon-reload,
or by an update of resources) starts from the spec.

:mod:`hooks.edits.verification` checks the result independently.

Source: OCI runtime specification, config.md and config-linux.md.
"""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from hooks.edits import applied
from hooks.errors import DeviceConflict
from hooks.ocispec import Json, has_user_namespace, misshapen, part
from hooks.plan import (
    RULED_KINDS,
    UNLESS_SET,
    Device,
    Hook,
    Mount,
    Plan,
    device_node,
    device_rule,
    hook_entry,
    mount_entry,
    mounted_node,
    moved_interfaces,
    resource_control,
)
from hooks.requests.oci_hooks import LISTS, has_nvidia_hook, is_nvidia_hook


def apply(spec: Mapping[str, Any], plan: Plan, layered: tuple[Mount, ...] = ()) -> Json:
    """Return a new spec with a plan's edits; it shares unchanged parts with the old one.

    Args:
        spec: config.json, decoded. It is not changed.
        plan: the edits. This function ignores its links and libraries, which are files.
        layered: mounts whose files are in a layer of the image.

    Raises:
        MalformedSpec: a part to edit has the wrong shape.
        DeviceConflict: the spec has a different device at the path of one in the plan.
    """
    edited = dict(spec)
    if has_nvidia_hook(spec):
        edited["hooks"] = {
            name: [hook for hook in entries if not is_nvidia_hook(hook)]
            if name in LISTS and isinstance(entries, list)
            else entries
            for name, entries in spec["hooks"].items()
        }
    process = part(spec, "process", dict)
    if process:
        edited["process"] = apply_process(process, plan.environment, plan.additional_gids)
    mounted = _mounted_nodes(spec, plan.devices)
    if plan.mounts or mounted or layered:
        mounts = applied.without(part(spec, "mounts", list), layered)
        there = {_destination(mount) for mount in mounts}
        edited["mounts"] = mounts + [
            entry
            for entry in (*map(mount_entry, plan.mounts), *mounted.values())
            if posixpath.normpath(entry["destination"]) not in there
        ]
    if plan.devices:
        edited["linux"] = _apply_devices(part(spec, "linux", dict), plan.devices, mounted)
    if plan.hooks:
        edited["hooks"] = _apply_hooks(part(edited, "hooks", dict), plan.hooks)
    if plan.intel_rdt:
        linux = part(edited, "linux", dict)
        edited["linux"] = {"intelRdt": resource_control(plan.intel_rdt[-1]), **linux}
    if plan.net_devices:
        linux = part(edited, "linux", dict)
        moved = moved_interfaces(plan.net_devices) | part(linux, "netDevices", dict, "linux.")
        edited["linux"] = {**linux, "netDevices": moved}
    return edited


def apply_process(
    process: Mapping[str, Any],
    environment: Iterable[tuple[str, str]],
    additional_gids: Iterable[int],
) -> Json:
    """Return a process, of init or of an exec, with variables and groups added.

    Args:
        process: the OCI process, decoded. It is not changed.
        environment: names and values; if a name occurs several times, the last value counts.
        additional_gids: supplementary groups.

    Raises:
        MalformedSpec: a part to edit has the wrong shape.
    """
    edited = dict(process)
    entries = part(process, "env", list, "process.")
    # The process sees the last entry of a name.
    now = dict(str(entry).partition("=")[::2] for entry in entries)
    added = [
        f"{name}={value}"
        for name, value in dict(environment).items()
        if now.get(name) != value and not (name in UNLESS_SET and name in now)
    ]
    if added:
        edited["env"] = entries + added
    user = part(process, "user", dict, "process.")
    gids = part(user, "additionalGids", list, "process.user.")
    wanted = [gid for gid in additional_gids if gid not in gids and gid != user.get("gid")]
    if wanted:
        edited["user"] = {**user, "additionalGids": gids + wanted}
    return edited


def _mounted_nodes(spec: Mapping[str, Any], devices: Iterable[Device]) -> dict[str, Json]:
    """Return the mounts that stand for devices, by path."""
    if not has_user_namespace(spec):
        return {}
    found = {device.path: mounted_node(device) for device in devices}
    return {path: entry for path, entry in found.items() if entry is not None}


def _apply_devices(linux: Json, devices: Iterable[Device], mounted: Collection[str]) -> Json:
    nodes = part(linux, "devices", list, "linux.")
    resources = part(linux, "resources", dict, "linux.")
    rules = part(resources, "devices", list, "linux.resources.")
    by_path = {_text(node, "path"): node for node in nodes}
    allowed = _allowed(rules)
    new_nodes, new_rules = [], []
    for device in devices:
        other = by_path.get(device.path)
        if other is None and device.path in mounted:
            pass  # the runtime does not create this node
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
        there = part(edited, hook.kind, list, "hooks.")
        entry = hook_entry(hook)
        if entry not in there:
            edited[hook.kind] = [*there, entry]
    return edited


def _allowed(rules: Iterable[Any]) -> set[tuple[Any, Any, Any, Any]]:
    """Return the devices that single rules allow after the last rule that denies."""
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
    # "u" is POSIX's unbuffered character device, which Linux treats like "c".
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
        raise misshapen(f"{name} of an entry", f"a string: {value!r}")
    return value
