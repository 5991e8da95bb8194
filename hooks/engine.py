"""The engine from its callers' point of view: a request in, an edited spec and a record out.

A container goes through these steps, each of which is one function::

    request   = read_request(spec, config)                           # what it requests
    verdict   = judge(spec, request, config)                         # what policy allows of it
    inventory = look_at_node(verdict.allowed, config, …)             # what the node has
    injection = inject(spec, verdict.allowed, inventory, target, …)  # grant to files

:func:`inject` decides which devices are granted, plans the edits, applies them to the spec, checks
the result, and only then places files in the image. :func:`explain` does the same but places
nothing.

Files go to a target (:mod:`hooks.targets`): the container's rootfs, or a layer of its image that
already has them. A layer is created once for all containers of an image with the same request, and
stores its plan (:mod:`hooks.prepared`)::

    key      = placement_key(spec, verdict.allowed, inventory, config)
    prepared = prepare(spec, verdict.allowed, inventory, layer, …)   # or from an earlier container
    target   = LayerTarget(prepared, …)

:func:`hooks.requests.prefilter.prefilter` decides first, without loading the engine, whether the
engine has any work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from api.values import dataclass, replace
from hooks import platforms
from hooks.config import Config, Platform, load_config
from hooks.contributions import Case, Check
from hooks.edits import applied
from hooks.edits.exclusions import refuse_excluded
from hooks.edits.grant import Grant, decide
from hooks.edits.requirements import check_requirements
from hooks.errors import DeviceNodeMissing, MigModeGpu, MigUnknown, NoGpus, UnknownDevice
from hooks.image.layer_files import LayerFile, layer_files
from hooks.image.placement import Placed, place_inside
from hooks.image.rootfs import Rootfs
from hooks.node import nvml
from hooks.node.device_nodes import MadeNodes
from hooks.node.driver import find_driver
from hooks.node.fingerprint import Fingerprint
from hooks.node.host_setup import CharLinks, link_nodes, load_commands, make_missing
from hooks.node.identity import identity_of
from hooks.node.inventory import (
    NOT_KEPT,
    Inventory,
    load_inventory,
    look_again,
    take_inventory,
)
from hooks.node.kubelet import read_kubelet_record
from hooks.ocispec import has_user_namespace
from hooks.plan import Device, Plan
from hooks.prepared import Prepared
from hooks.prepared import key_of as placement_key
from hooks.record import apply_to_process, make_denial, make_record
from hooks.requests import policy
from hooks.requests.oci_hooks import calls_of
from hooks.requests.policy import Verdict
from hooks.requests.request import Request, read_more, read_request
from hooks.sharing import held_by_nodes
from hooks.targets import (
    NOWHERE,
    LayerTarget,
    Planned,
    RootfsTarget,
    Target,
    UnseenTarget,
)

__all__ = [
    "NOT_KEPT",
    "Injection",
    "Inventory",
    "LayerTarget",
    "Prepared",
    "RootfsTarget",
    "UnseenTarget",
    "apply_to_process",
    "explain",
    "has_applied",
    "inject",
    "judge",
    "load_config",
    "load_inventory",
    "look_at_node",
    "make_nodes",
    "module_commands",
    "more_of_listed",
    "needs_inventory",
    "placement_key",
    "prepare",
    "probe_command",
    "read_request",
    "take_inventory",
]

# Explaining runs no runtime; it assumes one that supports linux.netDevices.
_NEW_ENOUGH: Final = "1.3.0"
# Refusals that depend on what the node has, which may have changed meanwhile.
_FOUNDED_ON_INVENTORY: Final = (DeviceNodeMissing, MigModeGpu, MigUnknown, NoGpus, UnknownDevice)


# -- policy ------------------------------------------------------------------------------------


def judge(spec: Mapping[str, Any], request: Request, config: Config) -> Verdict:
    """Return what policy allows of a request. In a pod, this reads the kubelet's records.

    Returns:
        The verdict; the caller reports its denials.

    Raises:
        RequestError: policy denies it, and the configuration or a rule makes that an error.
        MalformedSpec: a part of the spec has the wrong shape.
    """
    container = policy.read_container(spec)
    record = None
    if policy.needs_record(container, config):
        record = read_kubelet_record(container, config)
    return policy.judge(request, container, config, record)


# -- inventory ---------------------------------------------------------------------------------


def needs_inventory(request: Request, config: Config) -> bool:
    """Whether the request needs an inventory of the node."""
    return request.wants_driver and platforms.platform_of(config) == Platform.NVML


def has_applied(spec: Mapping[str, Any], request: Request, config: Config) -> bool:
    """Whether an engine has already applied the container's whole part of NVIDIA's driver.

    Then it needs no inventory. With one, a layer can contain its files (:func:`placement_key`).
    """
    applied_alone = bool(calls_of(spec)) and not request.wants_driver
    return applied_alone and platforms.platform_of(config) == Platform.NVML


def module_commands(config: Config, request: Request) -> tuple[tuple[str, ...], ...]:
    """Return the commands that load kernel modules; run them before :func:`look_at_node`.

    Returns:
        Argument lists, in order; nearly always none. They need no environment and no stdin, end
        within :data:`hooks.node.host_setup.TIMEOUT`, and may fail.
    """
    return load_commands(config, request.capabilities) if needs_inventory(request, config) else ()


def probe_command(config: Config) -> tuple[str, ...]:
    """Return the command that queries NVML; run it before :func:`take_inventory`.

    Returns:
        The argument list. It needs no environment and no stdin; its answer is on stdout, and
        it ends within ``config.nvml_timeout``.

    Raises:
        DriverNotFound: there is no driver below the driver root.
        DriverMismatch: the driver's files do not match the loaded kernel module's version.
    """
    return nvml.probe_command(config, find_driver(Fingerprint(config.host_root), config))


def look_at_node(
    request: Request,
    config: Config,
    *,
    ask_nvml: Callable[[], Inventory],
    claim: Callable[[Inventory], None] = lambda _: None,
    seen: Inventory | None = None,
) -> Inventory:
    """Return an inventory from which a request can be granted, with the needed nodes created.

    The kernel does not report every change. So if an earlier inventory cannot grant a request, try
    once more with a new one.

    Args:
        ask_nvml: takes a new inventory (:func:`take_inventory`).
        claim: called with each inventory before the request is granted from it.
        seen: the inventory, if it was loaded just before.

    Raises:
        RequestError: the node does not have what is requested.
        InventoryError: the driver or a device cannot be used.
    """
    inventory = seen or load_inventory(config) or ask_nvml()
    while True:
        inventory = make_nodes(request, inventory, config)
        try:
            claim(inventory)
            decide(request, inventory)
        except _FOUNDED_ON_INVENTORY:
            if not inventory.kept or inventory.nvml_failure:
                raise
            inventory = ask_nvml()
        else:
            return inventory


def make_nodes(request: Request, inventory: Inventory, config: Config) -> Inventory:
    """Create the driver's device nodes that a container needs and the host lacks.

    Returns:
        The inventory, updated with the new nodes; its ``made`` lists what was done.
    """
    made = make_missing(config, inventory, request.capabilities)
    if made == MadeNodes():
        return inventory
    if made.made or made.found:
        inventory = look_again(config, inventory)
    return replace(inventory, made=made)


def more_of_listed(spec: Mapping[str, Any], inventory: Inventory) -> Request | None:
    """Return what a container requests beyond the devices that its spec already has.

    Returns:
        The request; None if it is not known which devices these are, as for a privileged container.

    Raises:
        MalformedSpec: a part of the spec has the wrong shape.
        RequestError: the request is malformed, or not allowed.
        InventoryError: the node does not have it.
    """
    container = policy.read_container(spec)
    nodes = (spec.get("linux") or {}).get("devices") or []
    held = held_by_nodes([str(node.get("path")) for node in nodes], inventory)
    if container.privileged or container.sandbox or not held:
        return None
    request = read_more(spec, held)
    decide(request, inventory)
    return request


# -- grant, plan, edits, check, files ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Injection:
    """The result of a request."""

    spec: dict[str, Any]  # the spec to give to the low-level runtime
    record: dict[str, Any]  # what was decided and why, as JSON values


def inject(
    spec: Mapping[str, Any],
    request: Request,
    inventory: Inventory | None,
    target: Target,
    *,
    config: Config,
    oci_version: Callable[[], str] = str,
    verdict: Verdict | None = None,
) -> Injection:
    """Give a container what it requests.

    A failure undoes everything that was written into the rootfs or the staging directory. The
    caller writes the spec. Missing links to device nodes on the host are created, and stay.

    Args:
        spec: config.json, decoded. It is not changed.
        request: what :func:`judge` allows of the container's request.
        inventory: from :func:`look_at_node`; None only if none is needed
            (:func:`needs_inventory`).
        target: where the container's files go.
        oci_version: asks the low-level runtime for the latest OCI runtime specification that it
            supports; "" if it cannot be asked. Few CDI specs need it.
        verdict: the result of :func:`judge`, for the record.

    Returns:
        The edited spec and the record. Without a grant, the spec is unchanged, and there is a
        record only if something was denied.

    Raises:
        RequestError: the node does not have what is requested.
        InventoryError: the driver or a device cannot be used.
        RootfsError: the image has no room for the files.
        SpecError: the spec is malformed, or an edit of it failed verification.
        CdiError: a CDI device is unknown, or its spec asks for something impossible.
        RuntimeUnasked: ``oci_version`` is needed but returns no version.
    """
    if not request.wants_injection:
        return _nothing(spec, verdict)
    clock = _Clock()
    with target:
        case = Case(spec, request, inventory, config, target.image, oci_version, config.state)
        decision = _decide(case, target, clock)
        placed = target.place(case, decision.planned)
    clock.lap("place")
    decision = decision.after(placed)
    clock.lap("apply")
    links = CharLinks()
    if config.char_links:
        nodes = [device for device in decision.plan.devices if device.kind == "c"]
        links = link_nodes(config.dev, nodes, _elsewhere(nodes, config))
    clock.lap("char links")
    return decision.injection(
        case, clock, char_links=links, verdict=verdict, layered=target.is_layer
    )


def explain(
    spec: Mapping[str, Any],
    request: Request,
    inventory: Inventory | None,
    *,
    rootfs: str | None,
    config: Config,
    verdict: Verdict | None = None,
) -> Injection:
    """Return what :func:`inject` would decide, without writing anything. Raises the same errors.

    Args:
        rootfs: the root of the container; None if it cannot be read. Library directories are then a
            guess.

    Returns:
        The edited spec, and the record without placed files.
    """
    if not request.wants_injection:
        return _nothing(spec, verdict)
    clock = _Clock()
    with RootfsTarget(rootfs, NOWHERE) as target:
        case = Case(spec, request, inventory, config, target.image, lambda: _NEW_ENOUGH)
        decision = _decide(case, target, clock)
    return decision.injection(case, clock, char_links=CharLinks(), verdict=verdict)


def prepare(
    spec: Mapping[str, Any],
    request: Request,
    inventory: Inventory,
    layer: Rootfs,
    *,
    rootfs: str,
    config: Config,
) -> tuple[Prepared, tuple[LayerFile, ...]]:
    """Write the files of all containers with the same request into a layer of their image.

    Args:
        spec: config.json, decoded, with a :func:`placement_key`.
        inventory: what the node has, with its nodes created.
        layer: the image as a container would see it; writes go to the layer.
        rootfs: where the root of this container will be.

    Returns:
        What :class:`~hooks.targets.LayerTarget` needs, and the files of the driver that the layer
        may have in place of their mount points (:meth:`Prepared.with_files`).

    Raises:
        NvshimError: it is impossible; :func:`inject` without a layer would raise the same.
    """
    observed = (inventory.files if config.driver_layer else None) or {}
    moved = applied.driver_mounts(spec, observed)
    case = Case(spec, request, inventory, config, layer, moved=moved)
    planned = _decide(case, RootfsTarget(rootfs, NOWHERE), _Clock()).planned
    plan = replace(planned.plan, mounts=(*planned.plan.mounts, *moved))
    placed = place_inside(layer, plan, planned.layout, fresh=config.driver_layer)
    # Its mounts are then in the plan.
    plan, placed = placed.added_to(plan), replace(placed, mounts=())
    files = layer_files(layer, plan, placed, observed)
    return Prepared(planned.layout, planned.compat, plan, placed), files


@dataclass(frozen=True, slots=True)
class _Decision:
    """The checked decision for a request; ``spec`` has the edits of its plan."""

    grant: Grant | None
    planned: Planned
    check: Check
    spec: dict[str, Any]

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    def after(self, placed: Placed) -> _Decision:
        """Return the decision, updated with what placing the files added and left out."""
        if placed.additions == self.planned.placed.additions:
            return replace(self, planned=replace(self.planned, placed=placed))
        plan = placed.added_to(self.plan)
        planned = replace(self.planned, plan=plan, placed=placed)
        return replace(self, planned=planned, spec=self.check.edited(plan, placed.layered))

    def injection(self, case: Case, clock: _Clock, **done: Any) -> Injection:
        """Return the result with its record."""
        record = make_record(
            spec=case.spec,
            request=case.request,
            grant=self.grant,
            inventory=case.inventory,
            made_nodes=None if case.inventory is None else case.inventory.made,
            layout=self.planned.layout,
            plan=self.plan,
            placed=self.planned.placed,
            contributions=self.planned.contributions,
            compat=self.planned.compat,
            identity=identity_of(
                self.plan, self.planned.placed.layered, case.inventory, case.config
            ),
            milliseconds=clock.laps,
            mapped=has_user_namespace(case.spec),
            **done,
        )
        return Injection(self.spec, record)


def _decide(case: Case, target: Target, clock: _Clock) -> _Decision:
    """Decide the grant, plan and edits, and check them, before any file is written."""
    grant = _grant(case)
    clock.lap("grant")
    planned = target.plan(case, grant, clock.lap)
    if case.config.excluded_gpus:
        refuse_excluded(planned.plan.devices, case.config, case.inventory)
    clock.lap("plan")
    check = Check(case.spec, planned.contributions, target.staging, target.rootfs)
    edited = check.edited(planned.plan, planned.placed.layered)
    clock.lap("check")
    return _Decision(grant, planned, check, edited)


def _grant(case: Case) -> Grant | None:
    """Return the devices that the container gets from an inventory; None if it requests none."""
    if case.inventory is None or not case.request.wants_driver:
        return None
    grant = decide(case.request, case.inventory)
    required = () if case.config.disable_require else case.request.requirements
    if required:
        check_requirements(required, grant, case.inventory)
    return grant


def _nothing(spec: Mapping[str, Any], verdict: Verdict | None) -> Injection:
    """Return the unchanged spec, and a record if something was denied."""
    denied = verdict is not None and verdict.reasons
    return Injection(dict(spec), make_denial(verdict) if verdict and denied else {})


def _elsewhere(devices: list[Device], config: Config) -> dict[str, str]:
    """Return the nodes that are not in the host's own /dev."""
    below = f"{config.dev.rstrip('/')}/"
    return {d.path: d.host for d in devices if d.host and not d.host.startswith(below)}


class _Clock:
    """Measures each step in milliseconds."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, step: str) -> None:
        now = time.perf_counter()
        self.laps[step] = (now - self._last) * 1000
        self._last = now
