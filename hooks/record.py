"""What was decided about one container, and why: kept in its bundle as JSON.

A person reads it through ``nvshim explain``; the shim reads it back for execs, whose spec is
made by CRI from one that predates the injection. Its keys are stable; new ones may be added.

==============  ==========================================================================
format          of this table; raised when a key changes its meaning
request         what was asked, in words, and where it was said
policy          who asked, what was denied and why; null if policy was not asked
grant           the GPUs, MIG devices and capabilities that were given, and what was not
vendors         what was given of devices that are not NVIDIA's, and what was not
node            driver version, its root and why that one, and what did not fit together
image           architecture, libc and library directory of each loader found in it
edits           devices, mounts, links, libraries, files; each with its reason; and hooks,
                resource control and interfaces if a CDI file brought any
process         variables and groups of every process: what :func:`process_edits` reads
proc_files      files of procfs that are covered before the start: their content on the host,
                and ``state``, what came of it
missing         what the driver should have and has not, with the places searched
left_out        destinations for which the image has no room
written         files and links that were written into the image, or into a layer of it
layered         whether they are in a layer that other containers of the image share
nodes           device nodes of the host that were made, and that could not be made
char_links      links in /dev/char of the host that were made, and that could not be made
cuda_compat     the image's directory whose libcuda comes first, or why none does
identity        the driver that it was made with: what :mod:`hooks.node.identity` compares at start
milliseconds    how long each step took
==============  ==========================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from hooks.edits.plan import NVIDIA
from hooks.errors import MalformedSpec
from hooks.requests.request import AllDevices, NamedDevices, NoDevices, Void

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hooks.edits.grant import Grant
    from hooks.edits.plan import Contribution, Plan
    from hooks.image.compat import Compat
    from hooks.image.layout import Layout
    from hooks.image.placement import Placed
    from hooks.node.char_links import CharLinks
    from hooks.node.inventory import Inventory
    from hooks.node.nodes import MadeNodes
    from hooks.requests.policy import Verdict
    from hooks.requests.request import Devices, Request

__all__ = ["make_denial", "make_record", "process_edits"]

FORMAT: Final = 1
PLANNED: Final = "planned"
"""The state of a file of procfs before somebody has tried to cover it."""


def make_record(
    *,
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
) -> dict[str, Any]:
    """The record of an injection, of values that JSON has.

    Args:
        request: what was asked.
        grant: what of NVIDIA's devices was given; None if nothing of its driver was asked.
        inventory: what the node has of that; None likewise.
        layout: what the image looks like.
        plan: the edits, as they were applied.
        placed: what was written.
        contributions: what the plan was made of.
        compat: what was decided of the image's own libcuda.
        char_links: what was linked on the host.
        made_nodes: what device nodes were made there; None for none.
        identity: what :func:`hooks.node.identity.identity_of` says; None without a driver.
        milliseconds: how long each step took.
        verdict: what policy said of the request.
        layered: whether what was written is in a layer of the image.

    Returns:
        The record, by the table in this module's head.
    """
    return {
        "format": FORMAT,
        "request": _requested(request if verdict is None else verdict.asked),
        "policy": None if verdict is None else _judged(verdict),
        "grant": None if grant is None else _granted(grant),
        "vendors": [
            {"vendor": c.vendor, "granted": list(c.granted), "notes": list(c.notes)}
            for c in contributions
            if c.vendor != NVIDIA
        ],
        "node": None if inventory is None else _node(inventory),
        "image": {
            "loaders": [
                {
                    "arch": loader.arch.value,
                    "libc": loader.libc.value,
                    "directory": loader.directory,
                    "searched": loader.searched,
                }
                for loader in layout.loaders
            ],
            "has_cache": layout.has_cache,
            "writable": layout.writable,
        },
        "edits": {
            "devices": [
                {
                    "path": d.path,
                    "major": d.major,
                    "minor": d.minor,
                    "access": d.access,
                    "reason": d.reason,
                }
                for d in plan.devices
            ],
            "mounts": [
                {"source": m.source, "destination": m.destination, "reason": m.reason}
                for m in plan.mounts
            ],
            "links": [
                {"path": link.path, "target": link.target, "reason": link.reason}
                for link in plan.links
            ],
            "libraries": [
                {"soname": c.soname, "path": c.path, "arch": c.arch.value} for c in plan.libraries
            ],
            "files": [{"path": f.path, "reason": f.reason} for f in plan.files],
            "link_directories": [
                {"path": d.path, "links": dict(d.links), "reason": d.reason}
                for d in plan.link_directories
            ],
            **_of_cdi_files(plan),
        },
        "proc_files": [
            {"path": path, "source": source, "reason": _reason(path, plan), "state": PLANNED}
            for path, source in placed.proc_files
        ],
        "process": {
            "environment": [list(variable) for variable in plan.environment],
            "additional_gids": list(plan.additional_gids),
        },
        "missing": [{"what": m.what, "sought": list(m.sought)} for m in plan.missing],
        "left_out": list(placed.omitted),
        "written": list(placed.written),
        "layered": layered,
        "nodes": _made(made_nodes),
        "char_links": {"made": list(char_links.made), "failed": dict(char_links.failed)},
        "cuda_compat": {
            "directory": compat.directory,
            "version": compat.version,
            "why": compat.why,
        },
        "identity": identity,
        "milliseconds": {step: round(value, 3) for step, value in milliseconds.items()},
    }


def make_denial(verdict: Verdict) -> dict[str, Any]:
    """The record of a container that is given nothing, of values that JSON has.

    Args:
        verdict: what policy said of its request.

    Returns:
        The record: of the table in this module's head, format, request, policy and process.
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
    """What every process of the container gets, execs as well.

    Args:
        record: what :func:`make_record` returned, or what JSON made of it.

    Returns:
        Variables with their values, and supplementary groups.

    Raises:
        MalformedSpec: it is no record of this format.
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


def _made(nodes: MadeNodes | None) -> dict[str, Any]:
    if nodes is None:
        return {"made": [], "failed": {}}
    return {"made": list(nodes.made), "failed": dict(nodes.failed)}


def _of_cdi_files(plan: Plan) -> dict[str, Any]:
    """The edits that only a CDI file brings; nothing for most containers."""
    edits = {
        "hooks": [
            {"stage": h.kind, "path": h.path, "args": list(h.args), "reason": h.reason}
            for h in plan.hooks
        ],
        "intel_rdt": [
            {name: getattr(control, name) for name in control.__match_args__}
            | {"schemata": list(control.schemata)}
            for control in plan.intel_rdt[-1:]
        ],
        "net_devices": [{"host_name": d.host_name, "name": d.name} for d in plan.net_devices],
    }
    return {kind: entries for kind, entries in edits.items() if entries}


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
        "amd_devices": request.amd_devices,
        "intel_devices": request.intel_devices,
        "origin": request.origin,
        "source": request.source,
    }


def _judged(verdict: Verdict) -> dict[str, Any]:
    container = verdict.container
    return {
        "mode": verdict.mode,
        "kubernetes": container.kubernetes,
        "sandbox": container.sandbox,
        "namespace": container.namespace,
        "privileged": container.privileged,
        "denied": list(verdict.denials),
        "notes": list(verdict.notes),
    }


def _granted(grant: Grant) -> dict[str, Any]:
    return {
        "capabilities": sorted(grant.capabilities),
        "gpus": [
            {"index": g.index, "uuid": g.uuid, "bus_id": g.bus_id, "model": g.model}
            for g in grant.gpus
        ],
        "mig_devices": [
            {"gpu": d.gpu, "index": d.index, "uuid": d.uuid, "profile": d.profile}
            for d in grant.mig_devices
        ],
        "notes": list(grant.notes),
    }


def _node(inventory: Inventory) -> dict[str, Any]:
    return {
        "driver": inventory.driver.version,
        "cuda": inventory.cuda_version,
        "driver_root": inventory.driver.root,
        "driver_layout": inventory.driver.layout,
        "driver_why": inventory.driver.why,
        "nvml": inventory.nvml_failure or "answered",
        "notes": list(inventory.notes),
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
