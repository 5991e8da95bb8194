"""The engine as its callers see it: a request in, an edited spec and a record out.

A container's way through it, each step of which is one function::

    request   = read_request(spec, config)                           # what it requests
    verdict   = judge(spec, request, config)                         # what policy allows of it
    inventory = look_at_node(verdict.allowed, config, …)             # what the node has
    injection = inject(spec, verdict.allowed, inventory, target, …)  # grant to files

:func:`inject` decides which devices are granted, plans the edits, writes them into the spec, checks
the result, and places files in the image. Everything is decided and checked before anything is
written. :func:`explain` does the same and writes nothing.

Files go to a target (:mod:`hooks.targets`): the container's rootfs, or a layer of its image that
has them already. A layer is made once for all containers of an image that request the same, and
what was planned and placed then is kept with it (:mod:`hooks.prepared`)::

    key      = placement_key(spec, verdict.allowed, inventory, config)
    prepared = prepare(spec, verdict.allowed, inventory, layer, …)   # or from an earlier container
    target   = LayerTarget(prepared, …)

:func:`hooks.requests.prefilter.prefilter` decides before, without loading the engine, whether there
is anything for it to do.
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

# Explaining asks no runtime; what it tells holds for one that knows linux.netDevices.
_NEW_ENOUGH: Final = "1.3.0"
# Refusals that say what the node has. They are wrong if it has something else by now.
_FOUNDED_ON_INVENTORY: Final = (DeviceNodeMissing, MigModeGpu, MigUnknown, NoGpus, UnknownDevice)


# -- policy ------------------------------------------------------------------------------------


def judge(spec: Mapping[str, Any], request: Request, config: Config) -> Verdict:
    """What policy allows of a request. In a pod, the kubelet's records are read for it.

    Returns:
        The verdict; report its denials.

    Raises:
        RequestError: it is denied, and that is an error by configuration or by rule.
        MalformedSpec: a part of the spec has the wrong shape.
    """
    container = policy.read_container(spec)
    record = None
    if policy.needs_record(container, config):
        record = read_kubelet_record(container, config)
    return policy.judge(request, container, config, record)


# -- inventory ---------------------------------------------------------------------------------


def needs_inventory(request: Request, config: Config) -> bool:
    """Whether what is asked takes an inventory of the node."""
    return request.wants_driver and platforms.platform_of(config) == Platform.NVML


def has_applied(spec: Mapping[str, Any], request: Request, config: Config) -> bool:
    """Whether all that a container has of NVIDIA's driver is what an engine has applied.

    It needs no inventory. With one, a layer can have its files (:func:`placement_key`).
    """
    applied_alone = bool(calls_of(spec)) and not request.wants_driver
    return applied_alone and platforms.platform_of(config) == Platform.NVML


def module_commands(config: Config, request: Request) -> tuple[tuple[str, ...], ...]:
    """The commands that load kernel modules, to be run before :func:`look_at_node`.

    Returns:
        Argument lists, in order; nearly always none. They need no environment and no stdin,
        end within :data:`hooks.node.host_setup.TIMEOUT`, and may fail.
    """
    return load_commands(config, request.capabilities) if needs_inventory(request, config) else ()


def probe_command(config: Config) -> tuple[str, ...]:
    """The command that asks NVML, to be run before :func:`take_inventory`.

    Returns:
        The argument list. It needs no environment and no stdin; its answer is on stdout, and
        it ends within ``config.nvml_timeout``.

    Raises:
        DriverNotFound: there is no driver below the driver root.
        DriverMismatch: its files are not of the loaded kernel module's version.
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
    """The inventory that a request can be granted from, with the nodes that it needs made.

    The kernel does not report every change. So a request that an earlier inventory refuses is tried
    again with a new one, once.

    Args:
        ask_nvml: takes a new inventory (:func:`take_inventory`).
        claim: called with each inventory before the request is granted from it.
        seen: the inventory, if it was loaded a moment ago.

    Raises:
        RequestError: the node does not have what is asked.
        InventoryError: the driver or a device is not fit for use.
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
    """Make the driver's device nodes that a container needs and the host does not have.

    Returns:
        The inventory with the nodes as they are now; its ``made`` says what was done.
    """
    made = make_missing(config, inventory, request.capabilities)
    if made == MadeNodes():
        return inventory
    if made.made or made.found:
        inventory = look_again(config, inventory)
    return replace(inventory, made=made)


def more_of_listed(spec: Mapping[str, Any], inventory: Inventory) -> Request | None:
    """What a container requests besides the devices that its spec has already.

    Returns:
        The request; None if it cannot be said which devices these are, as of a privileged
        container.

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
    """What came of a request."""

    spec: dict[str, Any]  # the spec to give to the low-level runtime
    record: dict[str, Any]  # what was decided and why, of values that JSON has


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

    A failure undoes what was written into the rootfs or the staging directory. The spec is returned
    and not written. On the host, missing links to device nodes are made, and stay.

    Args:
        spec: config.json, decoded. It is not changed.
        request: what :func:`judge` allows of what the container asks for.
        inventory: from :func:`look_at_node`; None only if none is needed
            (:func:`needs_inventory`).
        target: where the container's files go.
        oci_version: asks the low-level runtime for the latest OCI runtime specification that it
            knows; "" if it cannot be asked. Few CDI specs need it.
        verdict: what :func:`judge` said, for the record.

    Returns:
        The edited spec, and the record. If nothing is granted, the spec as it is; then there is a
        record only if something was denied.

    Raises:
        RequestError: the node does not have what is asked.
        InventoryError: the driver or a device is not fit for use.
        RootfsError: the image has no room for what has to be written.
        SpecError: the spec is malformed, or an edit of it failed verification.
        CdiError: a CDI device is unknown, or its spec asks for what cannot be done.
        RuntimeUnasked: ``oci_version`` is needed, and does not say any.
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
    """What :func:`inject` would decide, without writing or making anything; raises the same.

    Args:
        rootfs: the root of the container; None if there is none to look at, and then the
            directories of libraries are a guess.

    Returns:
        The edited spec, and the record, in which nothing is placed.
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
    """Write the files of a container into a layer of its image, for all with the same request.

    Args:
        spec: config.json, decoded, with a :func:`placement_key`.
        inventory: what the node has, its nodes made.
        layer: the image, as a container of its own would see it; what is written is the layer.
        rootfs: where the root of this container will be.

    Returns:
        What :class:`~hooks.targets.LayerTarget` needs of it, and the files of the driver that the
        layer may have in place of their mount points (:meth:`Prepared.with_files`).

    Raises:
        NvshimError: it cannot be done; :func:`inject` without it would say the same.
    """
    observed = (inventory.files if config.driver_layer else None) or {}
    moved = applied.driver_mounts(spec, observed)
    case = Case(spec, request, inventory, config, layer, moved=moved)
    planned = _decide(case, RootfsTarget(rootfs, NOWHERE), _Clock()).planned
    plan = replace(planned.plan, mounts=(*planned.plan.mounts, *moved))
    placed = place_inside(layer, plan, planned.layout, fresh=config.driver_layer)
    # Its mounts are in the plan then.
    plan, placed = placed.added_to(plan), replace(placed, mounts=())
    files = layer_files(layer, plan, placed, observed)
    return Prepared(planned.layout, planned.compat, plan, placed), files


@dataclass(frozen=True, slots=True)
class _Decision:
    """What the engine does for a request, checked. ``spec`` has the edits of the plan."""

    grant: Grant | None
    planned: Planned
    check: Check
    spec: dict[str, Any]

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    def after(self, placed: Placed) -> _Decision:
        """The decision with what placing its files added to it and left out of it."""
        if placed.additions == self.planned.placed.additions:
            return replace(self, planned=replace(self.planned, placed=placed))
        plan = placed.added_to(self.plan)
        planned = replace(self.planned, plan=plan, placed=placed)
        return replace(self, planned=planned, spec=self.check.edited(plan, placed.layered))

    def injection(self, case: Case, clock: _Clock, **done: Any) -> Injection:
        """The result, with the record of it."""
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
    """Grant, plan and edits, checked: everything that can be decided before a file is written."""
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
    """The devices that the container gets by an inventory; None if it asks for none of them."""
    if case.inventory is None or not case.request.wants_driver:
        return None
    grant = decide(case.request, case.inventory)
    required = () if case.config.disable_require else case.request.requirements
    if required:
        check_requirements(required, grant, case.inventory)
    return grant


def _nothing(spec: Mapping[str, Any], verdict: Verdict | None) -> Injection:
    """The spec as it is, and a record if something was denied."""
    denied = verdict is not None and verdict.reasons
    return Injection(dict(spec), make_denial(verdict) if verdict and denied else {})


def _elsewhere(devices: list[Device], config: Config) -> dict[str, str]:
    """The nodes that are not below the host's own directory of them."""
    below = f"{config.dev.rstrip('/')}/"
    return {d.path: d.host for d in devices if d.host and not d.host.startswith(below)}


class _Clock:
    """Milliseconds of each step since the one before."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, step: str) -> None:
        now = time.perf_counter()
        self.laps[step] = (now - self._last) * 1000
        self._last = now
