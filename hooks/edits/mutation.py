"""Writing a plan into an OCI spec, and checking the result independently.

:func:`apply` is pure: it returns a new spec and leaves the old one as it was. What it does not
know survives untouched. What is there already is not added again, so that a second pass
changes nothing:

==========  ============================  ====================================================
edit        added to                      is there already if
==========  ============================  ====================================================
device      linux.devices                 a node has the same path, type and numbers
            linux.resources.devices       a rule allows it after the last rule that denies
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

:func:`verify` believes nothing of that. It takes the old spec, the new one and the plan, and
checks the invariants from outside:

- everything that was in the spec still is, in the same order, and lists only grew at the end;
  but every hook of NVIDIA's is gone;
- nothing but what is listed above has changed: no namespace, no masked or read-only path, no
  seccomp, AppArmor or SELinux setting, no capability, no argument; and no hook, resource control
  or interface unless the plan has any;
- what was added is in the plan; the devices are of known types and majors; the sources of mounts
  are below the driver root or our staging directory and not in the image; no destination is
  below /proc or /sys; of procfs, only files below /proc/driver are to be covered, and none of
  the kernel's is to be written; a hook runs a program that the operator allows, with an
  environment of its own.

:func:`verify_bounds` holds each vendor's part of the plan to what that vendor promised: what one
may bring, another may not.

Source: OCI runtime specification, config.md and config-linux.md.
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from hooks.errors import DeviceConflict, MalformedSpec, VerificationFailed
from hooks.requests.glance import HOOK_LISTS, has_nvidia_hook, is_nvidia_hook

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from hooks.edits.plan import Contribution, Device, Hook, IntelRdt, Mount, NetDevice, Plan

    Json: TypeAlias = dict[str, Any]

__all__ = ["apply", "apply_process", "verify", "verify_bounds"]


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
    if plan.mounts:
        mounts = _list(spec, "mounts")
        there = {_destination(mount) for mount in mounts}
        edited["mounts"] = mounts + [
            _mount(mount)
            for mount in plan.mounts
            if posixpath.normpath(mount.destination) not in there
        ]
    if plan.devices:
        edited["linux"] = _apply_devices(_object(spec, "linux"), plan.devices)
    if plan.hooks:
        edited["hooks"] = _apply_hooks(_object(edited, "hooks"), plan.hooks)
    if plan.intel_rdt:
        linux = _object(edited, "linux")
        edited["linux"] = {"intelRdt": _intel_rdt(plan.intel_rdt[-1]), **linux}
    if plan.net_devices:
        linux = _object(edited, "linux")
        moved = _net_devices(plan.net_devices) | _object(linux, "netDevices", "linux.")
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


def _apply_devices(linux: Json, devices: Iterable[Device]) -> Json:
    nodes = _list(linux, "devices", "linux.")
    resources = _object(linux, "resources", "linux.")
    rules = _list(resources, "devices", "linux.resources.")
    by_path = {_text(node, "path"): node for node in nodes}
    allowed = _allowed(rules)
    new_nodes, new_rules = [], []
    for device in devices:
        other = by_path.get(device.path)
        if other is None:
            new_nodes.append(_node(device))
        elif not _is_same(other, device):
            raise DeviceConflict(
                f"{device.path} ({device.reason})",
                found=f"the container has another device there, "
                f"{other.get('major')}:{other.get('minor')}",
                do="leave the path free",
            )
        has_rule = device.kind in _RULED and device.access
        if has_rule and (device.kind, device.major, device.minor, device.access) not in allowed:
            new_rules.append(_rule(device))
    return {
        **linux,
        "devices": nodes + new_nodes,
        "resources": {**resources, "devices": rules + new_rules},
    }


_RULED: Final = frozenset("cb")
"""The types of devices that the device cgroup has rules for."""


def _apply_hooks(hooks: Json, wanted: Iterable[Hook]) -> Json:
    edited = dict(hooks)
    for hook in wanted:
        there = _list(edited, hook.kind, "hooks.")
        entry = _hook(hook)
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
            if all(isinstance(part, int | str) for part in what) and what[0] in _RULED:
                allowed.add(what)
    return allowed


def _node(device: Device) -> Json:
    return {
        "path": device.path,
        "type": device.kind,
        "major": device.major,
        "minor": device.minor,
        "fileMode": device.mode,
        "uid": device.uid,
        "gid": device.gid,
    }


def _rule(device: Device) -> Json:
    return {
        "allow": True,
        "type": device.kind,
        "major": device.major,
        "minor": device.minor,
        "access": device.access,
    }


def _mount(mount: Mount) -> Json:
    return {
        "destination": mount.destination,
        "type": mount.kind,
        "source": mount.source,
        "options": list(mount.options),
    }


def _hook(hook: Hook) -> Json:
    entry: Json = {
        "path": hook.path,
        "args": list(hook.args),
        "env": list(hook.environment),
    }
    return entry if hook.timeout is None else {**entry, "timeout": hook.timeout}


def _intel_rdt(control: IntelRdt) -> Json:
    fields = {
        "closID": control.clos_id,
        "l3CacheSchema": control.l3_cache_schema,
        "memBwSchema": control.mem_bw_schema,
        "schemata": list(control.schemata),
        "enableMonitoring": control.enable_monitoring,
        "enableCMT": control.enable_cmt,
        "enableMBM": control.enable_mbm,
    }
    return {name: value for name, value in fields.items() if value}


def _net_devices(devices: Iterable[NetDevice]) -> Json:
    return {device.host_name: {"name": device.name} for device in devices}


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


# The lists that may grow, by their path in the spec; everything else stays as it was.
_GROWING: Final = (
    ("process", "env"),
    ("process", "user", "additionalGids"),
    ("mounts",),
    ("linux", "devices"),
    ("linux", "resources", "devices"),
)
_HANDS_OFF: Final = ("/proc", "/sys")
_OF_DRIVERS: Final = "/proc/driver/"


def verify(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    plan: Plan,
    *,
    source_roots: Collection[str],
    forbidden_roots: Collection[str] = (),
    majors: Collection[int],
    block_majors: Collection[int] = (),
    mount_kinds: Collection[str] = ("bind",),
    hook_programs: Collection[str] = (),
) -> None:
    """Checks that a mutated spec is what a plan allows, whoever mutated it.

    Args:
        before: the spec as it came.
        after: the spec as it is to go.
        plan: all edits that were to be made.
        source_roots: directories of the host that sources of mounts may be below.
        forbidden_roots: directories of the host that they may not be below: the image.
        majors: the major numbers that added character devices may have.
        block_majors: the major numbers that added block devices may have.
        mount_kinds: the types that added mounts may have.
        hook_programs: the programs that added hooks may run.

    Raises:
        VerificationFailed: an invariant of this module's head does not hold.
    """
    before = _without_nvidia_hooks(before)
    growing = (*_GROWING, *(("hooks", kind) for kind in {hook.kind for hook in plan.hooks}))
    added = {path: _growth(before, after, path) for path in growing}
    settings = _settings(plan)
    _expect(
        _without(before, (*growing, *settings)) == _without(after, (*growing, *settings)),
        "something other than devices, mounts, environment and groups has changed",
    )
    for path, wanted in settings.items():
        _verify_setting(_at(before, path), _at(after, path), wanted, ".".join(path))
    _verify_process(added["process", "env"], added["process", "user", "additionalGids"], plan)
    _verify_mounts(added["mounts",], plan, source_roots, forbidden_roots, mount_kinds)
    _verify_files(plan)
    known = {"c": majors, "b": block_majors}
    nodes, rules = added["linux", "devices"], added["linux", "resources", "devices"]
    _verify_devices(nodes, rules, plan, known)
    for path in growing:
        if path[0] == "hooks":
            _verify_hooks(path[1], added[path], plan, hook_programs)


def _verify_mounts(
    mounts: list[Any],
    plan: Plan,
    source_roots: Collection[str],
    forbidden_roots: Collection[str],
    kinds: Collection[str],
) -> None:
    allowed = {mount.destination: _mount(mount) for mount in plan.mounts}
    for mount in mounts:
        _expect(isinstance(mount, dict), "no object", mount)
        _expect(
            mount == allowed.get(mount.get("destination")), "a mount that is not planned", mount
        )
        source, destination = mount["source"], mount["destination"]
        _expect(mount["type"] in kinds, "a mount of another kind", mount)
        _expect(_is_clean(destination), "a path not normal", mount)
        _expect(
            not _is_below_any(destination, _HANDS_OFF),
            "a mount over the kernel's files",
            destination,
        )
        if _is_bind(mount):
            _expect(_is_clean(source), "a path not normal", mount)
            _expect(_is_below_any(source, source_roots), "a source elsewhere", source)
            _expect(not _is_below_any(source, forbidden_roots), "a source in the image", source)


def _verify_files(plan: Plan) -> None:
    for path in (*(f.path for f in plan.files), *(d.path for d in plan.link_directories)):
        _expect(_is_clean(path), "a path not normal", path)
        _expect(not _is_below_any(path, _HANDS_OFF), "a file of the kernel's", path)
    for covered in plan.proc_files:
        of_drivers = _is_clean(covered.path) and covered.path.startswith(_OF_DRIVERS)
        _expect(of_drivers, "a file of procfs that is no driver's", covered.path)


def _verify_devices(
    nodes: list[Any], rules: list[Any], plan: Plan, known: Mapping[str, Collection[int]]
) -> None:
    planned = {device.path: _node(device) for device in plan.devices}
    for node in nodes:
        _expect(isinstance(node, dict), "no object", node)
        _expect(node == planned.get(node.get("path")), "a device that is not planned", node)
        _expect(_is_clean(node["path"]), "a path not normal", node)
        _expect(not _is_below_any(node["path"], _HANDS_OFF), "a file of the kernel's", node)
    allowed = [_rule(device) for device in plan.devices]
    for rule in rules:
        _expect(rule in allowed, "a device rule that is not planned", rule)
        _expect(rule["type"] in _RULED and rule["access"], "a rule for no device", rule)
    for entry in (*nodes, *rules):
        _verify_number(entry["type"], entry["major"], known, entry)


def _verify_number(
    kind: str, major: int, known: Mapping[str, Collection[int]], what: object
) -> None:
    if kind == "p":
        return  # a FIFO has no numbers, and is the container's own
    _expect(kind in known, "no device", what)
    _expect(major in known[kind], "a device of another driver", what)


def _verify_hooks(kind: str, hooks: list[Any], plan: Plan, programs: Collection[str]) -> None:
    planned = [_hook(hook) for hook in plan.hooks if hook.kind == kind]
    for hook in hooks:
        _expect(hook in planned, "a hook that is not planned", hook)
        _expect(hook["path"] in programs, "a hook that is not allowed", hook)
        _expect(hook["env"], "a hook with the image's environment", hook)


def verify_bounds(contribution: Contribution, forbidden_roots: Collection[str]) -> None:
    """Checks that a vendor's part of a plan is what that vendor may bring.

    Args:
        contribution: the part, and its bounds.
        forbidden_roots: directories of the host that sources may not be below: the image.

    Raises:
        VerificationFailed: it is not.
    """
    plan = contribution.plan
    known = {"c": contribution.majors, "b": contribution.block_majors}
    for device in plan.devices:
        _verify_number(device.kind, device.major, known, device)
    for mount in plan.mounts:
        _expect(mount.kind in contribution.mount_kinds, "a mount of another kind", mount)
        if _is_bind(_mount(mount)):
            source = mount.source
            elsewhere = not _is_below_any(source, contribution.source_roots)
            _expect(not elsewhere, "a source elsewhere", source)
            _expect(not _is_below_any(source, forbidden_roots), "a source in the image", source)
    for hook in plan.hooks:
        _expect(hook.path in contribution.hook_programs, "a hook that is not allowed", hook)


def _verify_process(environment: list[Any], gids: list[Any], plan: Plan) -> None:
    variables = [f"{name}={value}" for name, value in plan.environment]
    for entry in environment:
        _expect(entry in variables, "a variable that is not planned", entry)
    for gid in gids:
        _expect(gid in plan.additional_gids and gid != 0, "a group that is not planned", gid)


def _without_nvidia_hooks(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """The spec as it has to be kept: NVIDIA's hook is what may, and has to, go."""
    expected = dict(spec)
    for name in HOOK_LISTS:
        entries = _at(spec, ("hooks", name))
        if isinstance(entries, list):
            kept = [hook for hook in entries if not is_nvidia_hook(hook)]
            expected["hooks"] = {**expected["hooks"], name: kept}
    return expected


def _growth(
    before: Mapping[str, Any], after: Mapping[str, Any], path: tuple[str, ...]
) -> list[Any]:
    """What was added to a list, at whose beginning the old one still has to be."""
    old, new = _at(before, path) or [], _at(after, path) or []
    name = ".".join(path)
    _expect(isinstance(old, list) and isinstance(new, list), "no list any more", name)
    _expect(new[: len(old)] == old, "an entry was changed or removed", name)
    return list(new[len(old) :])


def _at(spec: Any, path: Iterable[str]) -> Any:
    for name in path:
        spec = spec.get(name) if isinstance(spec, dict) else None
    return spec


def _settings(plan: Plan) -> dict[tuple[str, ...], Json]:
    """What a plan may set where nothing was set before, by its path in the spec."""
    settings: dict[tuple[str, ...], Json] = {}
    if plan.intel_rdt:
        settings["linux", "intelRdt"] = _intel_rdt(plan.intel_rdt[-1])
    if plan.net_devices:
        settings["linux", "netDevices"] = _net_devices(plan.net_devices)
    return settings


def _verify_setting(old: Any, new: Any, wanted: Json, name: str) -> None:
    if name == "linux.netDevices":
        before, after = old or {}, new or {}
        _expect(isinstance(after, dict) and isinstance(before, dict), "no object any more", name)
        _expect(after == {**wanted, **before}, "an interface that is not planned", name)
    else:
        _expect(new == (wanted if old is None else old), "a setting that is not planned", name)


def _is_bind(mount: Mapping[str, Any]) -> bool:
    return mount["type"] == "bind" or not {"bind", "rbind"}.isdisjoint(mount["options"])


def _without(spec: Mapping[str, Any], paths: Collection[tuple[str, ...]]) -> Json:
    """The spec without what may change, and without objects that are then empty."""

    def strip(value: Mapping[str, Any], paths: Collection[tuple[str, ...]]) -> Json:
        rest = {}
        for name, entry in value.items():
            below = [path[1:] for path in paths if path[0] == name]
            if () in below:
                continue
            if below and (entry is None or isinstance(entry, dict)):
                kept = strip(entry or {}, below)
                if kept:
                    rest[name] = kept
                continue
            rest[name] = entry
        return rest

    return strip(spec, paths)


def _is_clean(path: str) -> bool:
    return path.startswith("/") and posixpath.normpath(path) == path


def _is_below_any(path: str, roots: Iterable[str]) -> bool:
    return any(path == root or path.startswith(f"{root.rstrip('/')}/") for root in roots)


def _expect(holds: object, otherwise: str, what: object = "") -> None:
    if not holds:
        raise VerificationFailed(
            "to verify the edited spec",
            found=f"{otherwise}: {what}" if what else otherwise,
            do="nothing was started; report this, it is a defect of the shim",
        )
