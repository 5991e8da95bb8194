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
==========  ============================  ====================================================

One thing is taken out: NVIDIA's own hook (:func:`hooks.glance.is_nvidia_hook`), which Docker's
``--gpus`` adds, and NVIDIA's legacy runtime; it would do again what is done here.

A device is in both lists, because whoever rebuilds the cgroup later (systemd on daemon-reload,
an update of resources) rebuilds it from the spec.

:func:`verify` believes nothing of that. It takes the old spec, the new one and the plan, and
checks the invariants from outside:

- everything that was in the spec still is, in the same order, and lists only grew at the end;
  but every hook of NVIDIA's is gone;
- nothing but the five lists above has changed: no hook, no namespace, no masked or read-only
  path, no seccomp, AppArmor or SELinux setting, no capability, no argument;
- what was added is in the plan; the devices are character devices of known majors; the
  sources of mounts are below the driver root or our staging directory and not in the image;
  no destination is below /proc or /sys; of procfs, only files below /proc/driver are to be
  covered, and none of the kernel's is to be written.

Source: OCI runtime specification, config.md and config-linux.md.
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from hooks.errors import DeviceConflict, MalformedSpec, VerificationFailed
from hooks.glance import HOOK_LISTS, has_nvidia_hook, is_nvidia_hook

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from hooks.plan import Device, Mount, Plan

    Json: TypeAlias = dict[str, Any]

__all__ = ["apply", "apply_process", "verify"]


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
        if (device.major, device.minor, device.access) not in allowed:
            new_rules.append(_rule(device))
    return {
        **linux,
        "devices": nodes + new_nodes,
        "resources": {**resources, "devices": rules + new_rules},
    }


def _allowed(rules: Iterable[Any]) -> set[tuple[Any, Any, Any]]:
    """The character devices that single rules allow after the last rule that denies."""
    allowed: set[tuple[Any, Any, Any]] = set()
    for rule in rules:
        if not isinstance(rule, dict) or not rule.get("allow"):
            allowed.clear()
        elif rule.get("type") == "c":
            allowed.add((rule.get("major"), rule.get("minor"), rule.get("access")))
    return allowed


def _node(device: Device) -> Json:
    return {
        "path": device.path,
        "type": "c",
        "major": device.major,
        "minor": device.minor,
        "fileMode": device.mode,
        "uid": device.uid,
        "gid": device.gid,
    }


def _rule(device: Device) -> Json:
    return {
        "allow": True,
        "type": "c",
        "major": device.major,
        "minor": device.minor,
        "access": device.access,
    }


def _mount(mount: Mount) -> Json:
    return {
        "destination": mount.destination,
        "type": "bind",
        "source": mount.source,
        "options": list(mount.options),
    }


def _is_same(node: Mapping[str, Any], device: Device) -> bool:
    # "u" is the unbuffered character device of POSIX; Linux makes no difference.
    return node.get("type") in {"c", "u"} and (node.get("major"), node.get("minor")) == (
        device.major,
        device.minor,
    )


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
) -> None:
    """Checks that a mutated spec is what a plan allows, whoever mutated it.

    Args:
        before: the spec as it came.
        after: the spec as it is to go.
        plan: all edits that were to be made.
        source_roots: directories of the host that sources of mounts may be below.
        forbidden_roots: directories of the host that they may not be below: the image.
        majors: the major numbers that added devices may have.

    Raises:
        VerificationFailed: an invariant of this module's head does not hold.
    """
    before = _without_nvidia_hooks(before)
    added = {path: _growth(before, after, path) for path in _GROWING}
    _expect(
        _without_growing(before) == _without_growing(after),
        "something other than devices, mounts, environment and groups has changed",
    )
    _verify_process(added["process", "env"], added["process", "user", "additionalGids"], plan)
    allowed = {mount.destination: _mount(mount) for mount in plan.mounts}
    for mount in added["mounts",]:
        _expect(isinstance(mount, dict), "no object", mount)
        _expect(
            mount == allowed.get(mount.get("destination")), "a mount that is not planned", mount
        )
        source, destination = mount["source"], mount["destination"]
        _expect(_is_clean(source) and _is_clean(destination), "a path not normal", mount)
        _expect(_is_below_any(source, source_roots), "a source elsewhere", source)
        _expect(not _is_below_any(source, forbidden_roots), "a source in the image", source)
        _expect(
            not _is_below_any(destination, _HANDS_OFF),
            "a mount over the kernel's files",
            destination,
        )
    for path in (*(f.path for f in plan.files), *(d.path for d in plan.link_directories)):
        _expect(_is_clean(path), "a path not normal", path)
        _expect(not _is_below_any(path, _HANDS_OFF), "a file of the kernel's", path)
    for covered in plan.proc_files:
        of_drivers = _is_clean(covered.path) and covered.path.startswith(_OF_DRIVERS)
        _expect(of_drivers, "a file of procfs that is no driver's", covered.path)
    nodes = {device.path: _node(device) for device in plan.devices}
    for node in added["linux", "devices"]:
        _expect(isinstance(node, dict), "no object", node)
        _expect(node == nodes.get(node.get("path")), "a device that is not planned", node)
    rules = [_rule(device) for device in plan.devices]
    for rule in added["linux", "resources", "devices"]:
        _expect(rule in rules, "a device rule that is not planned", rule)
    for entry in (*added["linux", "devices"], *added["linux", "resources", "devices"]):
        _expect(entry["type"] == "c", "not a character device", entry)
        _expect(entry["major"] in majors, "a device of another driver", entry)


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


def _without_growing(spec: Mapping[str, Any]) -> Json:
    """The spec without the lists that may grow, and without objects that are then empty."""

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

    return strip(spec, _GROWING)


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
