"""Check an edited OCI spec against its plan, independently of the code that edited it.

:func:`verify` does not trust :mod:`hooks.edits.mutation`. It takes the old spec, the new one and
the plan, and checks:

- everything in the old spec is still there, in the same order, and lists have only grown at the
  end. The exceptions, which must be gone: NVIDIA's hooks that are done in process
  (:mod:`hooks.requests.oci_hooks`), and read-only mounts of files that a layer has at the same
  place;
- nothing has changed except what that module lists: no namespace, no masked or read-only path, no
  seccomp, AppArmor or SELinux setting, no capability, no argument; and no hook, resource control or
  interface unless the plan has any;
- all additions are in the plan. Devices have known types and major numbers. Sources of mounts are
  among the driver's files or in our staging directory, never in the image; a user namespace also
  has mounts of device nodes. No destination is below /proc or /sys. In procfs, only files below
  /proc/driver are covered, and no kernel file is written. A hook runs a program that the operator
  allows, with its own environment.

:func:`verify_bounds` checks each vendor's part of the plan against that vendor's own bounds.

Source: OCI runtime specification, config.md and config-linux.md.
"""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

from hooks.errors import VerificationFailed
from hooks.ocispec import Json, has_user_namespace
from hooks.plan import (
    RULED_KINDS,
    Bounds,
    Contribution,
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
from hooks.requests.oci_hooks import LISTS, is_nvidia_hook
from hooks.words import KERNELS

# The lists that may grow, by path in the spec; all else stays as it was.
_GROWING: Final = (
    ("process", "env"),
    ("process", "user", "additionalGids"),
    ("mounts",),
    ("linux", "devices"),
    ("linux", "resources", "devices"),
)
_OF_DRIVERS: Final = "/proc/driver/"


def verify(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    plan: Plan,
    bounds: Bounds,
    forbidden_roots: Collection[str] = (),
    *,
    layered: Collection[Mount] = (),
) -> None:
    """Check that an edited spec has only what the plan allows, within bounds.

    Args:
        forbidden_roots: host directories that must not contain the source of a mount.
        layered: mounts whose files are in a layer of the image.

    Raises:
        VerificationFailed: one of the invariants above does not hold.
    """
    before = _without_layered(_without_nvidia_hooks(before), layered)
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
    mounts = added["mounts",]
    if has_user_namespace(before):
        mounts = _without_nodes(mounts, plan)
    _verify_mounts(mounts, plan, bounds, forbidden_roots)
    _verify_files(plan)
    nodes, rules = added["linux", "devices"], added["linux", "resources", "devices"]
    _verify_devices(nodes, rules, plan, bounds)
    for path in growing:
        if path[0] == "hooks":
            _verify_hooks(path[1], added[path], plan, bounds.hook_programs)


def _without_nodes(mounts: list[Any], plan: Plan) -> list[Any]:
    """Return the mounts that do not stand for planned devices, and verify those that do."""
    planned = [mounted_node(device) for device in plan.devices]
    for mount in mounts:
        if mount in planned:
            for path in (mount["source"], mount["destination"]):
                _expect(_is_clean(path), "a path not normal", mount)
                _expect(not _is_below_any(path, KERNELS), "a file of the kernel's", mount)
    return [mount for mount in mounts if mount not in planned]


def _verify_mounts(
    mounts: list[Any], plan: Plan, bounds: Bounds, forbidden_roots: Collection[str]
) -> None:
    allowed = {mount.destination: mount_entry(mount) for mount in plan.mounts}
    for mount in mounts:
        _expect(isinstance(mount, dict), "no object", mount)
        _expect(
            mount == allowed.get(mount.get("destination")), "a mount that is not planned", mount
        )
        source, destination = mount["source"], mount["destination"]
        _expect(mount["type"] in bounds.mount_kinds, "a mount of another kind", mount)
        _expect(_is_clean(destination), "a path not normal", mount)
        _expect(
            not _is_below_any(destination, KERNELS),
            "a mount over the kernel's files",
            destination,
        )
        if _is_bind(mount):
            _expect(_is_clean(source), "a path not normal", mount)
            _verify_source(source, bounds, forbidden_roots)


def _verify_source(source: str, bounds: Bounds, forbidden_roots: Collection[str]) -> None:
    _expect(_is_below_any(source, bounds.source_roots), "a source elsewhere", source)
    _expect(not _is_below_any(source, forbidden_roots), "a source in the image", source)


def _verify_files(plan: Plan) -> None:
    for path in (*(f.path for f in plan.files), *(d.path for d in plan.link_directories)):
        _expect(_is_clean(path), "a path not normal", path)
        _expect(not _is_below_any(path, KERNELS), "a file of the kernel's", path)
    for covered in plan.proc_files:
        of_drivers = _is_clean(covered.path) and covered.path.startswith(_OF_DRIVERS)
        _expect(of_drivers, "a file of procfs that is no driver's", covered.path)


def _verify_devices(nodes: list[Any], rules: list[Any], plan: Plan, bounds: Bounds) -> None:
    planned = {device.path: device_node(device) for device in plan.devices}
    for node in nodes:
        _expect(isinstance(node, dict), "no object", node)
        _expect(node == planned.get(node.get("path")), "a device that is not planned", node)
        _expect(_is_clean(node["path"]), "a path not normal", node)
        _expect(not _is_below_any(node["path"], KERNELS), "a file of the kernel's", node)
    allowed = [device_rule(device) for device in plan.devices]
    for rule in rules:
        _expect(rule in allowed, "a device rule that is not planned", rule)
        _expect(rule["type"] in RULED_KINDS and rule["access"], "a rule for no device", rule)
    for entry in (*nodes, *rules):
        _verify_number(entry["type"], entry["major"], bounds, entry)


def _verify_number(kind: str, major: int, bounds: Bounds, what: object) -> None:
    if kind == "p":
        return  # a FIFO has no numbers, and belongs to the container
    known = {"c": bounds.majors, "b": bounds.block_majors}
    _expect(kind in known, "no device", what)
    _expect(major in known[kind], "a device of another driver", what)


def _verify_hooks(kind: str, hooks: list[Any], plan: Plan, programs: Collection[str]) -> None:
    planned = [hook_entry(hook) for hook in plan.hooks if hook.kind == kind]
    for hook in hooks:
        _expect(hook in planned, "a hook that is not planned", hook)
        _expect(hook["path"] in programs, "a hook that is not allowed", hook)
        _expect(hook["env"], "a hook with the image's environment", hook)


def verify_bounds(contribution: Contribution, forbidden_roots: Collection[str]) -> None:
    """Check that a vendor's part of a plan stays within that vendor's bounds.

    Raises:
        VerificationFailed: it does not.
    """
    plan, bounds = contribution.plan, contribution.bounds
    for device in plan.devices:
        _verify_number(device.kind, device.major, bounds, device)
    for mount in plan.mounts:
        _expect(mount.kind in bounds.mount_kinds, "a mount of another kind", mount)
        if _is_bind(mount_entry(mount)):
            _verify_source(mount.source, bounds, forbidden_roots)
    for hook in plan.hooks:
        _expect(hook.path in bounds.hook_programs, "a hook that is not allowed", hook)
    for setting in (*plan.intel_rdt, *plan.net_devices):
        _expect(bounds.host_settings, "a setting of the host's", setting)


def _verify_process(environment: list[Any], gids: list[Any], plan: Plan) -> None:
    variables = [f"{name}={value}" for name, value in plan.environment]
    for entry in environment:
        _expect(entry in variables, "a variable that is not planned", entry)
    for gid in gids:
        _expect(gid in plan.additional_gids and gid != 0, "a group that is not planned", gid)


def _without_nvidia_hooks(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the spec without NVIDIA's hooks, the only ones to remove."""
    expected = dict(spec)
    for name in LISTS:
        entries = _at(spec, ("hooks", name))
        if isinstance(entries, list):
            kept = [hook for hook in entries if not is_nvidia_hook(hook)]
            expected["hooks"] = {**expected["hooks"], name: kept}
    return expected


def _without_layered(spec: Mapping[str, Any], layered: Collection[Mount]) -> Mapping[str, Any]:
    """Return the spec without the mounts that a layer replaces."""
    mounts, there = spec.get("mounts"), {(m.source, m.destination) for m in layered}
    if not isinstance(mounts, list) or not there:
        return spec
    kept = [
        mount
        for mount in mounts
        if (mount.get("source"), mount["destination"]) not in there
        or "ro" not in (mount.get("options") or ())
    ]
    return {**spec, "mounts": kept}


def _growth(
    before: Mapping[str, Any], after: Mapping[str, Any], path: tuple[str, ...]
) -> list[Any]:
    """Return the entries added to a list, which must still start with the old ones."""
    old, new = _at(before, path) or [], _at(after, path) or []
    name = ".".join(path)
    _expect(isinstance(old, list) and isinstance(new, list), "no longer a list", name)
    _expect(new[: len(old)] == old, "an entry was changed or removed", name)
    return list(new[len(old) :])


def _at(spec: Any, path: Iterable[str]) -> Any:
    for name in path:
        spec = spec.get(name) if isinstance(spec, dict) else None
    return spec


def _settings(plan: Plan) -> dict[tuple[str, ...], Json]:
    """Return the values that a plan may set if unset before, by path in the spec."""
    settings: dict[tuple[str, ...], Json] = {}
    if plan.intel_rdt:
        settings["linux", "intelRdt"] = resource_control(plan.intel_rdt[-1])
    if plan.net_devices:
        settings["linux", "netDevices"] = moved_interfaces(plan.net_devices)
    return settings


def _verify_setting(old: Any, new: Any, wanted: Json, name: str) -> None:
    if name == "linux.netDevices":
        before, after = old or {}, new or {}
        _expect(isinstance(after, dict) and isinstance(before, dict), "no longer an object", name)
        _expect(after == {**wanted, **before}, "an interface that is not planned", name)
    else:
        _expect(new == (wanted if old is None else old), "a setting that is not planned", name)


def _is_bind(mount: Mapping[str, Any]) -> bool:
    return mount["type"] == "bind" or not {"bind", "rbind"}.isdisjoint(mount["options"])


def _without(spec: Mapping[str, Any], paths: Collection[tuple[str, ...]]) -> Json:
    """Return the spec without the parts that may change, and without objects left empty."""

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
    each = tuple(roots)
    return path in each or path.startswith(_as_prefixes(each))


@lru_cache(maxsize=16)
def _as_prefixes(directories: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{directory.rstrip('/')}/" for directory in directories)


def _expect(holds: object, otherwise: str, what: object = "") -> None:
    if not holds:
        raise VerificationFailed(
            "to verify the edited spec",
            found=f"{otherwise}: {what}" if what else otherwise,
            do="nothing was started; report this, it is a defect of the shim",
        )
