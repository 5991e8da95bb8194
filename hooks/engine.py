"""The engine as its callers see it: a request in, an edited spec and a record out.

    config = load_config()
    request = read_request(spec, config)
    if request.wants_injection:
        verdict = judge(spec, request, config)  # what policy allows of it
        needed = needs_inventory(verdict.allowed, config)
        inventory = load_inventory(config) if needed else None
        if needed and inventory is None:
            answer = RUN(probe_command(config))     # the caller's reaper, its time limit
            inventory = take_inventory(config, answer)
        injection = inject(spec, verdict.allowed, inventory, rootfs=…, staging=…, config=config,
                           verdict=verdict)

Where the image is one that others share, and its files can be made once for all of them::

    key = placement_key(spec, verdict.allowed, inventory, config)
    prepared = prepare(spec, verdict.allowed, inventory, layer, …)    # or kept from an earlier time
    injection = inject(…, prepared=prepared)

A caller that must be light asks :func:`hooks.requests.glance.may_ask` first: this
module loads everything that an injection needs.
"""

from __future__ import annotations

import marshal
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from api.values import changed, value
from hooks import platforms
from hooks.cdi.errors import RuntimeUnasked
from hooks.config import Platform, load_config
from hooks.edits.grant import decide
from hooks.edits.mutation import apply, apply_process
from hooks.edits.plan import Contribution, united
from hooks.edits.planning import arches_of, make_plan
from hooks.edits.verification import verify, verify_bounds
from hooks.errors import (
    DeviceNodeMissing,
    MalformedSpec,
    MigModeGpu,
    MigUnknown,
    NoGpus,
    UnknownDevice,
)
from hooks.holding import held_by_nodes
from hooks.image.compat import Compat, find_compat, host_of, with_compat
from hooks.image.layout import read_layout, unseen_layout
from hooks.image.placement import Placed, as_staged, place, place_inside, stage_beside
from hooks.image.rootfs import Rootfs
from hooks.node import nvml
from hooks.node.char_links import CharLinks, link_nodes
from hooks.node.driver import find_driver
from hooks.node.identity import identity_of
from hooks.node.inventory import (
    NOT_KEPT,
    Inventory,
    load_inventory,
    look_again,
    take_inventory,
)
from hooks.node.modules import load_commands
from hooks.node.nodes import MadeNodes, make_missing
from hooks.node.witness import Witness
from hooks.prepared import Prepared, key_of
from hooks.record import make_denial, make_record, process_edits
from hooks.requests import policy
from hooks.requests.exclusions import refuse_excluded
from hooks.requests.request import Void, read_more, read_request
from hooks.requests.requirements import check_requirements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hooks.config import Config
    from hooks.edits.grant import Grant
    from hooks.edits.plan import Arch, Plan
    from hooks.image.compat import Host
    from hooks.image.layout import Layout
    from hooks.requests.policy import Verdict
    from hooks.requests.request import Request

    _Look: TypeAlias = Callable[[tuple[Arch, ...]], Layout]

__all__ = [
    "FOUNDED_ON_INVENTORY",
    "NOT_KEPT",
    "Injection",
    "Inventory",
    "Prepared",
    "RuntimeUnasked",
    "apply_to_process",
    "explain",
    "inject",
    "judge",
    "load_config",
    "load_inventory",
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

FOUNDED_ON_INVENTORY: Final = (DeviceNodeMissing, MigModeGpu, MigUnknown, NoGpus, UnknownDevice)
"""The refusals that say what the node has, and are wrong if it has something else by now."""

# Nothing of a node is below it.
_NOWHERE: Final = "/dev/null"
# Explaining asks no runtime; what it tells holds for one that knows linux.netDevices.
_NEW_ENOUGH: Final = "1.3.0"


@value
class Injection:
    """What came of a request.

    Attributes:
        spec: the spec to give to the low-level runtime.
        record: what was decided and why, of values that JSON has.
    """

    spec: dict[str, Any]
    record: dict[str, Any]


def probe_command(config: Config) -> tuple[str, ...]:
    """The command that asks NVML, to be run before :func:`take_inventory`.

    Args:
        config: where the driver is.

    Returns:
        The argument list. It needs no environment and no stdin; its answer is on stdout, and
        it ends within ``config.nvml_timeout``.

    Raises:
        DriverNotFound: there is no driver below the driver root.
        DriverMismatch: its files are not of the loaded kernel module's version.
    """
    return nvml.probe_command(config, find_driver(Witness(config.host_root), config))


def module_commands(config: Config, request: Request) -> tuple[tuple[str, ...], ...]:
    """The commands that load kernel modules, to be run before :func:`take_inventory`.

    Args:
        config: where sysfs and the driver are.
        request: what the container asks for.

    Returns:
        Argument lists, in order; nearly always none. They need no environment and no stdin,
        end within :data:`hooks.node.modules.TIMEOUT`, and may fail.
    """
    return load_commands(config, request.capabilities) if needs_inventory(request, config) else ()


def needs_inventory(request: Request, config: Config) -> bool:
    """Whether what is asked takes an inventory of the node.

    Args:
        request: what :func:`read_request` made of a spec.
        config: what the node is like.
    """
    return request.wants_driver and platforms.platform_of(config) == Platform.NVML


def make_nodes(
    request: Request, inventory: Inventory, config: Config
) -> tuple[Inventory, MadeNodes]:
    """Makes the driver's device nodes that a container needs and nobody has made, on the host.

    Args:
        request: what is to be given.
        inventory: what the node has.
        config: where the nodes are, and whether they may be made.

    Returns:
        The inventory with the nodes as they are now, and what was done.
    """
    made = make_missing(config, inventory, request.capabilities)
    return (look_again(config, inventory) if made.made or made.found else inventory), made


def more_of_listed(spec: Mapping[str, Any], inventory: Inventory) -> Request | None:
    """What a container asks for beside the devices that its spec has already.

    Args:
        spec: config.json, decoded.
        inventory: what the node has.

    Returns:
        The request; None if nobody can say which devices these are, as of a privileged container.

    Raises:
        MalformedSpec: a part of the spec has the wrong shape.
        RequestError: what is asked cannot be understood, or may not be had.
        InventoryError: the node does not have it.
    """
    who = policy.read_container(spec)
    nodes = (spec.get("linux") or {}).get("devices") or []
    held = held_by_nodes([str(node.get("path")) for node in nodes], inventory)
    if who.privileged or who.sandbox or not held:
        return None
    request = read_more(spec, held)
    decide(request, inventory)
    return request


placement_key = key_of


def prepare(
    spec: Mapping[str, Any],
    request: Request,
    inventory: Inventory,
    layer: Rootfs,
    *,
    rootfs: str,
    config: Config,
) -> Prepared:
    """Writes what a container gets into a layer of its image, for all that ask the same.

    Args:
        spec: config.json, decoded, with a :func:`placement_key`.
        request: what is to be given.
        inventory: what the node has, its nodes made.
        layer: the image, as a container of its own would see it; what is written is the layer.
        rootfs: where the root of this container will be.
        config: where the driver is.

    Returns:
        What :func:`inject` needs of it.

    Raises:
        NvshimError: it cannot be done; :func:`inject` without it would say the same.
    """
    look = partial(read_layout, layer, spec_mounts=_mounts(spec))
    asked = _Asked(spec, request, inventory, config, image=layer)
    decision = _decide(asked, look, (_NOWHERE, rootfs), _Clock())
    inside = place_inside(layer, decision.plan, decision.layout)
    plan = _as_placed(decision.plan, Placed(inside.mounts, omitted=inside.omitted))
    # Those mounts are in the plan now.
    return Prepared(decision.layout, decision.compat, plan, changed(inside, mounts=()))


def inject(
    spec: Mapping[str, Any],
    request: Request,
    inventory: Inventory | None,
    *,
    rootfs: str,
    staging: str,
    config: Config,
    oci_version: str = "",
    verdict: Verdict | None = None,
    prepared: Prepared | None = None,
    made_nodes: MadeNodes | None = None,
) -> Injection:
    """Gives a container what it asks for.

    Everything is decided and verified before anything is written. What is written into the
    rootfs, or into the staging directory if the rootfs takes no writes, is taken back if that
    fails; the spec is returned and not written at all. On the host, device nodes of the driver
    and links to nodes are made where they are missing, and stay.

    Args:
        spec: config.json, decoded. It is not changed.
        request: what is to be given: what :func:`judge` allows of what it asks for.
        inventory: what the node has; None only if none is needed (:func:`needs_inventory`).
        rootfs: the mounted root of the container; nothing of it runs yet.
        staging: a directory of this container's bundle for files to be mounted from there. It
            need not exist, and goes with the bundle. It is of this container alone even if there
            is ``prepared``: one that may mount can write into what is mounted in it.
        config: where the driver is.
        oci_version: the latest version of the OCI runtime specification that the low-level
            runtime knows; "" if it was not asked. Few CDI specs need it, and say so.
        verdict: what :func:`judge` said, for the record.
        prepared: what :func:`prepare` has written into the image, under the same key; then
            nothing more is written there, and the image is not looked at.
        made_nodes: what :func:`make_nodes` did, of which ``inventory`` came; None to do it here.

    Returns:
        The edited spec, and the record. If nothing is to be given, the spec as it is; then there
        is a record if something was denied.

    Raises:
        RequestError: the node does not have what is asked.
        InventoryError: the driver or a device is not fit for use.
        RootfsError: the image has no room for what has to be written.
        SpecError: the spec is malformed, or an edit of it failed verification.
        CdiError: a CDI device is unknown, or its spec asks for what cannot be done.
        RuntimeUnasked: ``oci_version`` is needed; nothing was done.
    """
    if not request.wants_injection:
        return Injection(dict(spec), _unedited(verdict))
    clock = _Clock()
    made = made_nodes or MadeNodes()
    if inventory is not None and made_nodes is None:
        inventory, made = make_nodes(request, inventory, config)
    clock.lap("nodes")
    asked = _Asked(spec, request, inventory, config, oci_version, state=config.state)
    if prepared is not None and inventory is not None:
        decision = _decided_before(asked, inventory, prepared, (staging, rootfs), clock)
        plan, edited = decision.plan, decision.spec
        placed = stage_beside(prepared.inside, plan, staging)
        clock.lap("place")
    else:
        with Rootfs.open(rootfs) as image:
            look = partial(read_layout, image, spec_mounts=_mounts(spec))
            decision = _decide(changed(asked, image=image), look, (staging, rootfs), clock)
            placed = place(
                image,
                decision.plan,
                decision.layout,
                staging,
                library_path=_variable(spec, "LD_LIBRARY_PATH"),
                path=_variable(spec, "PATH"),
            )
        clock.lap("place")
        plan, edited = decision.plan, decision.spec
        if placed.mounts or placed.environment or placed.omitted:
            plan = _as_placed(plan, placed)
            edited = decision.check.edited(plan)
        clock.lap("apply")
    nodes = [device for device in plan.devices if device.kind == "c"]
    char_links = CharLinks()
    if config.char_links:
        char_links = link_nodes(config.dev, nodes, _elsewhere(inventory, config))
    clock.lap("char links")
    record = make_record(
        request=request,
        grant=decision.grant,
        inventory=inventory,
        layout=decision.layout,
        plan=plan,
        placed=placed,
        contributions=decision.contributions,
        compat=decision.compat,
        char_links=char_links,
        identity=identity_of(plan, inventory, config),
        milliseconds=clock.laps,
        made_nodes=made,
        verdict=verdict,
        layered=prepared is not None,
    )
    return Injection(edited, record)


def explain(
    spec: Mapping[str, Any],
    request: Request,
    inventory: Inventory | None,
    *,
    rootfs: str | None,
    config: Config,
    verdict: Verdict | None = None,
) -> Injection:
    """What :func:`inject` would decide, without writing or making anything.

    Args:
        spec: config.json, decoded. It is not changed.
        request: what is to be given: what :func:`judge` allows of what it asks for.
        inventory: what the node has; None only if none is needed (:func:`needs_inventory`).
        rootfs: the root of the container; None if there is none to look at, and then the
            directories of libraries are a guess.
        config: where the driver is.
        verdict: what :func:`judge` said, for the record.

    Returns:
        The edited spec, and the record, in which nothing is placed.

    Raises:
        RequestError: the node does not have what is asked.
        InventoryError: the driver or a device is not fit for use.
        RootfsError: there is no rootfs at that path.
        SpecError: the spec is malformed, or an edit of it failed verification.
    """
    if not request.wants_injection:
        return Injection(dict(spec), _unedited(verdict))
    clock = _Clock()
    with ExitStack() as stack:
        image = None
        if rootfs is None:
            look: _Look = unseen_layout
        else:
            image = stack.enter_context(Rootfs.open(rootfs))
            look = partial(read_layout, image, spec_mounts=_mounts(spec))
        asked = _Asked(spec, request, inventory, config, _NEW_ENOUGH, image)
        decision = _decide(asked, look, (_NOWHERE, rootfs or _NOWHERE), clock)
    record = make_record(
        request=request,
        grant=decision.grant,
        inventory=inventory,
        layout=decision.layout,
        plan=decision.plan,
        placed=Placed(),
        contributions=decision.contributions,
        compat=decision.compat,
        char_links=CharLinks(),
        identity=identity_of(decision.plan, inventory, config),
        milliseconds=clock.laps,
        verdict=verdict,
    )
    return Injection(decision.spec, record)


def judge(spec: Mapping[str, Any], request: Request, config: Config) -> Verdict:
    """What policy allows of a request.

    Args:
        spec: config.json, decoded.
        request: what :func:`read_request` made of it.
        config: the policy.

    Returns:
        The verdict; its denials are to be said to people.

    Raises:
        RequestError: it is denied, and that is to be an error, or it may not be had at all.
        MalformedSpec: a part of the spec has the wrong shape.
    """
    return policy.judge(request, policy.read_container(spec), config)


def _unedited(verdict: Verdict | None) -> dict[str, Any]:
    """The record of a container that is left as it is."""
    return make_denial(verdict) if verdict is not None and verdict.reasons else {}


@value
class _Decision:
    """What is to be done for a request; nothing is written yet."""

    grant: Grant | None
    layout: Layout
    compat: Compat
    contributions: list[Contribution]
    plan: Plan
    spec: dict[str, Any]
    check: _Check


@value
class _Asked:
    """A container's spec, what it asks for, the node that it asks, and its image if seen.

    ``state`` is where something may be kept; "" for nowhere.
    """

    spec: Mapping[str, Any]
    request: Request
    inventory: Inventory | None
    config: Config
    oci_version: str = ""
    image: Rootfs | None = None
    state: str = ""


def _decide(asked: _Asked, look: _Look, places: tuple[str, str], clock: _Clock) -> _Decision:
    """Everything that can be decided, verified.

    Args:
        asked: what is to be decided.
        look: gives the image's layout for some architectures.
        places: the staging directory and the rootfs, by path.
        clock: told when a step is done.
    """
    inventory, config = asked.inventory, asked.config
    grant = decide(asked.request, inventory) if inventory is not None else None
    if grant is not None and inventory is not None and not config.disable_require:
        check_requirements(asked.request.requirements, grant, inventory)
    clock.lap("grant")
    layout = look(arches_of(grant, inventory))
    clock.lap("layout")
    compat = Compat()
    contributions = []
    if grant is not None and inventory is not None:
        if not isinstance(asked.request.devices, Void):
            plan = make_plan(grant, inventory, layout)
            compat = _compat_of(asked, grant, plan, layout)
            plan = with_compat(plan, compat)
            contributions.append(Contribution(plan, inventory.nodes.majors, inventory.sources))
        contributions += _beside_gpus(asked, inventory, layout, contributions)
    elif asked.request.wants_driver:
        contributions.append(platforms.contribute(asked.spec, asked.request, asked.config, layout))
    contributions += _of_others(asked, layout)
    plan = united(each.plan for each in contributions)
    refuse_excluded(plan.devices, config, inventory)
    clock.lap("plan")
    check = _Check(asked.spec, contributions, *places)
    edited = check.edited(plan)
    clock.lap("check")
    return _Decision(grant, layout, compat, contributions, plan, edited, check)


def _decided_before(
    asked: _Asked,
    inventory: Inventory,
    prepared: Prepared,
    places: tuple[str, str],
    clock: _Clock,
) -> _Decision:
    """What :func:`_decide` said when the image was prepared; its bounds are those of now."""
    grant = decide(asked.request, inventory)
    clock.lap("grant")
    plan = _as_placed(prepared.plan, as_staged(prepared.inside, prepared.plan, places[0]))
    refuse_excluded(plan.devices, asked.config, inventory)
    sources = (*inventory.sources, places[0])
    contribution = Contribution(plan, inventory.nodes.majors, sources)
    check = _Check(asked.spec, [contribution], *places)
    edited = check.edited(plan)
    clock.lap("check")
    return _Decision(grant, prepared.layout, prepared.compat, [contribution], plan, edited, check)


def _compat_of(asked: _Asked, grant: Grant, plan: Plan, layout: Layout) -> Compat:
    """What is decided of the image's own libcuda."""
    inventory = asked.inventory
    if inventory is None or asked.image is None or not asked.config.cuda_compat:
        return Compat()
    gpus = (*grant.gpus, *(inventory.gpus[device.gpu] for device in grant.mig_devices))
    host = host_of(inventory.driver.version, inventory.cuda_version, gpus)
    return find_compat(asked.image, plan, layout, host, inventory.driver.arch)


def _of_others(asked: _Asked, layout: Layout) -> tuple[Contribution, ...]:
    """What the container gets of GPUs that are not NVIDIA's, and of whatever CDI specs have."""
    request, config = asked.request, asked.config
    if not (request.amd_devices or request.intel_devices or request.cdi_devices):
        return ()
    from hooks import vendors  # noqa: PLC0415 - most nodes have none of them

    if not request.cdi_devices:
        return vendors.contribute(request, config)
    from hooks.cdi.applying import contribute  # noqa: PLC0415 - as above
    from hooks.cdi.registry import resolve  # noqa: PLC0415

    resolved = resolve(
        request.cdi_devices,
        config.cdi_spec_dirs,
        builtin=vendors.known_kind,
        state=asked.state,
    )
    of_vendors = vendors.contribute(request, config, resolved.left)
    if not resolved.devices:
        return of_vendors
    of_specs = contribute(
        resolved,
        config=config,
        user=_user(asked.spec),
        oci_version=asked.oci_version,
        find_compat=_compat_finder(asked.image, layout),
    )
    return (*of_vendors, of_specs)


def _compat_finder(image: Rootfs | None, layout: Layout) -> Callable[[Plan, Host], Compat] | None:
    """Decides for an image, by what a CDI spec tells of the node; None if nothing can be."""
    arches = arches_of(None, None)
    if image is None or not arches:
        return None
    return lambda plan, host: find_compat(image, plan, layout, host, arches[0])


def apply_to_process(process: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """The process of an exec, with the variables and groups that init was given.

    Args:
        process: the OCI process, decoded. It is not changed.
        record: of the container's injection.

    Returns:
        A new process.

    Raises:
        MalformedSpec: the process or the record has the wrong shape.
    """
    return apply_process(process, *process_edits(record))


def _beside_gpus(
    asked: _Asked, inventory: Inventory, layout: Layout, so_far: Iterable[Contribution]
) -> tuple[Contribution, ...]:
    """What the container gets of NVIDIA's that is no GPU."""
    if not asked.request.features and asked.request.imex_channels == ():
        return ()
    from hooks.edits import features  # noqa: PLC0415 - few ask for any

    given = {device.path for each in so_far for device in each.plan.devices}
    return (features.contribute(asked.request, inventory, layout, asked.config, given),)


class _Check:
    """Edits a spec, and lets none out that does not verify."""

    def __init__(
        self,
        spec: Mapping[str, Any],
        contributions: Iterable[Contribution],
        staging: str,
        rootfs: str,
    ) -> None:
        self._spec = spec
        # Editing must not change it, and what is compared must not be what was edited.
        self._before = marshal.dumps(dict(spec))
        self._majors: frozenset[int] = frozenset()
        self._block_majors: frozenset[int] = frozenset()
        self._mount_kinds: frozenset[str] = frozenset({"bind"})
        self._hook_programs: frozenset[str] = frozenset()
        self._source_roots: tuple[str, ...] = (staging,)
        for each in contributions:
            verify_bounds(each, (rootfs,))
            self._majors |= each.majors
            self._block_majors |= each.block_majors
            self._mount_kinds |= each.mount_kinds
            self._hook_programs |= each.hook_programs
            self._source_roots += each.source_roots
        self._rootfs = rootfs

    def edited(self, plan: Plan) -> dict[str, Any]:
        edited = apply(self._spec, plan)
        verify(
            marshal.loads(self._before),  # noqa: S302 - our own, of a moment ago
            edited,
            plan,
            source_roots=self._source_roots,
            forbidden_roots=(self._rootfs,),
            majors=self._majors,
            block_majors=self._block_majors,
            mount_kinds=self._mount_kinds,
            hook_programs=self._hook_programs,
        )
        return edited


class _Clock:
    """Milliseconds of each step since the one before."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, step: str) -> None:
        now = time.perf_counter()
        self.laps[step] = (now - self._last) * 1000
        self._last = now


def _as_placed(plan: Plan, placed: Placed) -> Plan:
    """The plan with what placing its files added to it and left out of it."""
    omitted = frozenset(placed.omitted)
    return changed(
        plan,
        mounts=(*placed.mounts, *(m for m in plan.mounts if m.destination not in omitted)),
        environment=(*plan.environment, *placed.environment),
        links=tuple(link for link in plan.links if link.path not in omitted),
        files=tuple(file for file in plan.files if file.path not in omitted),
        link_directories=tuple(d for d in plan.link_directories if d.path not in omitted),
    )


def _elsewhere(inventory: Inventory | None, config: Config) -> dict[str, str]:
    """The nodes that are not below the host's own directory of them."""
    nodes = inventory.nodes.usable if inventory is not None else {}
    below = f"{config.dev.rstrip('/')}/"
    return {path: node.host for path, node in nodes.items() if not node.host.startswith(below)}


def _mounts(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    mounts = spec.get("mounts") or []
    if not isinstance(mounts, list) or not all(isinstance(mount, dict) for mount in mounts):
        raise MalformedSpec("mounts of config.json", found="it is no list of objects")
    return mounts


def _user(spec: Mapping[str, Any]) -> tuple[int, int]:
    """User and group of the container's process; read_request checked that it is one."""
    user = spec["process"].get("user") or {}
    uid, gid = (user.get(name) if isinstance(user, dict) else None for name in ("uid", "gid"))
    return (uid if isinstance(uid, int) else 0, gid if isinstance(gid, int) else 0)


def _variable(spec: Mapping[str, Any], name: str) -> str:
    """A variable as the container's processes will see it; read_request checked env."""
    entries = spec["process"].get("env") or []
    values = [e.partition("=")[2] for e in entries if e.startswith(f"{name}=")]
    return values[-1] if values else ""
