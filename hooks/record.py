"""The decision about one container, and its reasons: kept in its bundle as JSON.

Users read it with ``nvshim explain``. The shim reads it for execs, because CRI makes their spec
from the one before the injection. Its keys are stable; new ones may be added.

==============  ==========================================================================
format          the version of this table; raised when a key changes its meaning
request         what was requested, in words, and where that was written
policy          who asked, what was denied and why, and ``kubelet``, what the kubelet's record has
                for the container, if that decided; null if policy was not asked
grant           the GPUs, MIG devices and capabilities that were granted, and what was not
vendors         what was granted of devices that are not NVIDIA's, and what was not
node            the driver's version, its root and why that one, and inconsistencies
image           architecture, libc and library directory of each loader found in it
edits           devices, mounts, links, libraries, files; each with its reason; and hooks,
                resource control and interfaces if a CDI file brought any
in_spec         which of these edits the spec had before the shim saw it: paths of ``devices`` and
                of ``mounts``; an engine that applies CDI has put them there, or ``--device``
spec_hooks      the hooks that the spec had: ``done`` in process, and taken out; ``left``, which the
                runtime runs; and ``notes`` for display
process         variables and groups of every process: what :func:`process_edits` reads
proc_files      files of procfs that are covered before the start: their content on the host,
                and ``state``, what came of it
owned_nodes     in a user namespace, the nodes that not everybody may open: before the start each is
                covered by one that the container's users own; ``state`` as of ``proc_files``
missing         what the driver should have and has not; with the places searched, if few drivers
                lack it
left_out        destinations for which the image has no room
elsewhere       by destinations for which it has no room: paths that a variable names instead, or to
                which a link of the image leads
written         files and links that were written into the image, or into a layer of it
layered         whether they are in a layer that other containers of the image share
driver_layer    files of the driver that are in this layer, and therefore not mounted
nodes           device nodes of the host that were made, and that could not be made
char_links      links in /dev/char of the host that were made, and that could not be made
cuda_compat     the image's directory whose libcuda comes first, or why none does
identity        the driver that it was made with: what :mod:`hooks.node.identity` compares at start;
                null if nothing of a driver's files is known
milliseconds    the duration of each step
==============  ==========================================================================
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any, Final

from hooks.edits.compat import Compat
from hooks.edits.grant import Grant
from hooks.edits.mutation import apply_process
from hooks.errors import MalformedSpec
from hooks.image.layout import Layout
from hooks.image.placement import Placed
from hooks.node.device_nodes import MadeNodes
from hooks.node.host_setup import CharLinks
from hooks.node.inventory import Inventory
from hooks.ocispec import part, parts
from hooks.plan import Contribution, Plan, device_node, shut_devices
from hooks.requests.oci_hooks import hooks_of, is_nvidia_hook, tell_hook
from hooks.requests.policy import Verdict
from hooks.requests.request import Request
from hooks.words import NVIDIA, AllDevices, Devices, NamedDevices, NoDevices, Void

__all__ = ["is_needed", "make_denial", "make_record", "process_edits"]

FORMAT: Final = 1
PLANNED: Final = "planned"
"""The state of a procfs file before the shim has tried to cover it."""

# Without these nodes, of what was requested, a container cannot use a GPU.
_NEEDED: Final = ("/dev/", "libcuda.so.", "libnvidia-ml.so.")
_OPTIONAL: Final = ("/dev/nvidia-modeset", "/dev/nvidia-uvm-tools")


def make_record(
    *,
    spec: Mapping[str, Any],
    request: Request,
    grant: Grant | None,
    inventory: Inventory | None,
    layout: Layout,
    plan: Plan,
    placed: Placed,
    contributions: Iterable[Contribution],
    compat: Compat,
    char_links: CharLinks,
    made_nodes: MadeNodes | None = None,
    identity: Mapping[str, Any] | None,
    milliseconds: Mapping[str, float],
    verdict: Verdict | None = None,
    layered: bool = False,
    mapped: bool = False,
) -> dict[str, Any]:
    """Return the record of an injection, as JSON values, with the keys in the table above.

    Args:
        spec: the spec before the injection.
        grant: the granted NVIDIA devices; None if nothing of NVIDIA's driver was requested.
        inventory: what the node has; None if nothing of NVIDIA's driver was requested.
        identity: the result of :func:`hooks.node.identity.identity_of`; None without a driver.
        layered: whether the written files are in a layer of the image.
        mapped: whether the container has a user namespace.
    """
    made_nodes = made_nodes or MadeNodes()
    every = tuple(contributions)
    return {
        "format": FORMAT,
        "request": _requested(request if verdict is None else verdict.asked),
        "policy": None if verdict is None else _judged(verdict),
        "grant": None if grant is None else _granted(grant),
        "vendors": [
            {"vendor": c.vendor, "granted": list(c.granted), "notes": list(c.notes)}
            for c in every
            if c.vendor != NVIDIA
        ],
        "node": None if inventory is None else _node(inventory),
        "image": {
            "loaders": _rows(
                layout.loaders, "directory", "searched", arch="arch.value", libc="libc.value"
            ),
            "has_cache": layout.has_cache,
            "writable": layout.writable,
        },
        "edits": _edits(plan),
        "in_spec": _in_spec(spec, plan),
        "spec_hooks": {
            **_hooks(spec),
            "notes": [note for c in every if c.vendor == NVIDIA for note in c.notes],
        },
        "proc_files": [
            {"path": path, "source": source, "reason": _reason(path, plan), "state": PLANNED}
            for path, source in placed.proc_files
        ],
        "owned_nodes": [
            {**device_node(device), "state": PLANNED}
            for device in (shut_devices(plan.devices) if mapped else ())
        ],
        "process": {
            "environment": [list(variable) for variable in plan.environment],
            "additional_gids": list(plan.additional_gids),
        },
        "missing": [
            {"what": m.what, "sought": list(m.sought) if is_needed(m.what) else []}
            for m in plan.missing
        ],
        "left_out": [path for path in placed.omitted if path not in dict(placed.substitutes)],
        "elsewhere": dict(placed.substitutes),
        "written": list(placed.written),
        "layered": layered,
        "driver_layer": _rows(placed.layered, "source", "destination", "reason"),
        "nodes": {"made": list(made_nodes.made), "failed": dict(made_nodes.failed)},
        "char_links": {"made": list(char_links.made), "failed": dict(char_links.failed)},
        "cuda_compat": _row(compat, "directory", "version", "why"),
        "identity": identity,
        "milliseconds": {step: round(value, 3) for step, value in milliseconds.items()},
    }


def make_denial(verdict: Verdict) -> dict[str, Any]:
    """Return the record of a container that gets nothing, as JSON values.

    Returns:
        The record: format, request, policy and process of the table above.
    """
    return {
        "format": FORMAT,
        "request": _requested(verdict.asked),
        "policy": _judged(verdict),
        "process": {"environment": [], "additional_gids": []},
    }


def process_edits(
    record: Mapping[str, Any],
) -> tuple[tuple[tuple[str, str], ...], tuple[int, ...]]:
    """Return the edits of every process of the container, including execs.

    Args:
        record: the result of :func:`make_record`, possibly read back from JSON.

    Returns:
        Variables with their values, and supplementary groups.

    Raises:
        MalformedSpec: it is not a record in this format.
    """
    try:
        process = record["process"]
        environment = tuple((str(name), str(value)) for name, value in process["environment"])
        return environment, tuple(int(gid) for gid in process["additional_gids"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise MalformedSpec(
            "the record of an injection",
            found=f"no record of format {FORMAT}: {error!r}",
            do="see whether nvidia.json of the bundle was damaged",
        ) from error


def apply_to_process(process: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the process of an exec, with the variables and groups that init got.

    Args:
        process: the OCI process, decoded. It is not changed.

    Raises:
        MalformedSpec: the process or the record has the wrong shape.
    """
    return apply_process(process, *process_edits(record))


def is_needed(what: str) -> bool:
    """Whether a missing file is a fault; most drivers lack some of their files.

    Args:
        what: its name in the record's ``missing``.
    """
    return what.startswith(_NEEDED) and not what.startswith(_OPTIONAL) and "i386" not in what


def _rows(values: Iterable[object], *names: str, **paths: str) -> list[dict[str, Any]]:
    """Return some attributes of each value, by their names in the record."""
    keys = (*names, *paths)
    read = attrgetter(*names, *paths.values())
    return [dict(zip(keys, read(value), strict=True)) for value in values]


def _row(value: object, *names: str) -> dict[str, Any]:
    return _rows([value], *names)[0]


def _edits(plan: Plan) -> dict[str, Any]:
    """Return the edits; include kinds that only CDI files have only if there are any."""
    of_cdi_files = {
        "hooks": [
            {"stage": h.kind, "path": h.path, "args": list(h.args), "reason": h.reason}
            for h in plan.hooks
        ],
        "intel_rdt": [
            _row(control, *control.__match_args__) | {"schemata": list(control.schemata)}
            for control in plan.intel_rdt[-1:]
        ],
        "net_devices": _rows(plan.net_devices, "host_name", "name"),
    }
    return {
        "devices": _rows(plan.devices, "path", "major", "minor", "access", "reason"),
        "mounts": _rows(plan.mounts, "source", "destination", "reason"),
        "links": _rows(plan.links, "path", "target", "reason"),
        "libraries": _rows(plan.libraries, "soname", "path", arch="arch.value"),
        "files": _rows(plan.files, "path", "reason", "source"),
        "link_directories": [
            {"path": d.path, "links": dict(d.links), "reason": d.reason}
            for d in plan.link_directories
        ],
        **{kind: entries for kind, entries in of_cdi_files.items() if entries},
    }


def _in_spec(spec: Mapping[str, Any], plan: Plan) -> dict[str, list[str]]:
    """Return the planned devices and mounts that the spec already had before the edit."""
    listed = parts(part(spec, "linux", dict), "devices", dict, "linux.")
    nodes = {str(node.get("path")) for node in listed}
    mounted = parts(spec, "mounts", dict)
    there = {posixpath.normpath(str(mount.get("destination"))) for mount in mounted}
    return {
        "devices": [device.path for device in plan.devices if device.path in nodes],
        "mounts": [mount.destination for mount in plan.mounts if mount.destination in there],
    }


def _hooks(spec: Mapping[str, Any]) -> dict[str, list[dict[str, str]]]:
    """Return the hooks of a spec: those that the engine does in process, and those that stay."""
    told: dict[str, list[dict[str, str]]] = {"done": [], "left": []}
    for stage, hook in hooks_of(spec):
        kind = "done" if is_nvidia_hook(hook) else "left"
        told[kind].append({"stage": stage, "command": tell_hook(hook)})
    return told


def _reason(path: str, plan: Plan) -> str:
    return next(file.reason for file in plan.proc_files if file.path == path)


def _requested(request: Request) -> dict[str, Any]:
    channels = request.imex_channels
    return {
        "devices": _asked(request.devices),
        "capabilities": sorted(request.capabilities),
        "features": sorted(request.features),
        "imex_channels": "all" if channels is None else list(channels),
        "only_variables": sorted(request.only_variables),
        "requirements": [list(each) for each in request.requirements],
        "cdi_devices": list(request.cdi_devices),
        **_row(request, "amd_devices", "intel_devices", "origin", "source"),
    }


def _judged(verdict: Verdict) -> dict[str, Any]:
    return {
        "mode": verdict.mode,
        **_row(verdict.container, "kubernetes", "sandbox", "namespace", "privileged"),
        "denied": list(verdict.denials),
        "notes": list(verdict.notes),
        "kubelet": verdict.kubelet,
    }


def _granted(grant: Grant) -> dict[str, Any]:
    return {
        "capabilities": sorted(grant.capabilities),
        "gpus": _rows(grant.gpus, "index", "uuid", "bus_id", "model"),
        "mig_devices": _rows(grant.mig_devices, "gpu", "index", "uuid", "profile"),
        "notes": list(grant.notes),
    }


def _node(inventory: Inventory) -> dict[str, Any]:
    driver = inventory.driver
    return {
        "driver": driver.version,
        "cuda": inventory.cuda_version,
        "driver_root": driver.root,
        "driver_layout": driver.layout,
        "driver_why": driver.why,
        "nvml": inventory.nvml_failure or "answered",
        "notes": [*inventory.notes, *driver.notes],
    }


def _asked(devices: Devices) -> str | list[str]:
    match devices:
        case Void():
            return "void"
        case NoDevices():
            return "none"
        case AllDevices():
            return "all"
        case NamedDevices(names):
            return [str(name) for name in names]
