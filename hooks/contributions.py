"""What each source contributes to a container's plan: NVIDIA's driver, its features, other vendors.

Other vendors, CDI specs, and platforms with a different kind of driver produce the same kind of
edits as NVIDIA's driver, each within its bounds. So do the hooks that an engine has written into
the spec from one of NVIDIA's CDI specs.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Mapping
from typing import Any

from api.values import dataclass, replace
from hooks import platforms
from hooks.config import Config
from hooks.edits import applied, empty_libraries, features
from hooks.edits.compat import Compat, Host, find_compat, host_of, with_compat
from hooks.edits.grant import Grant
from hooks.edits.mutation import apply
from hooks.edits.planning import arches_of, make_plan
from hooks.edits.verification import verify, verify_bounds
from hooks.image.layout import Layout
from hooks.image.rootfs import Rootfs
from hooks.node.inventory import Inventory
from hooks.ocispec import parts, variables_of
from hooks.plan import Bounds, Contribution, Mount, Plan
from hooks.requests.oci_hooks import calls_of
from hooks.requests.request import Request
from hooks.words import Void


@dataclass(frozen=True, slots=True)
class Case:
    """A container, its allowed request, and the node."""

    spec: Mapping[str, Any]
    request: Request
    inventory: Inventory | None  # what the node has; None if the driver is not requested
    config: Config
    image: Rootfs | None = None  # the container's image; None if it cannot be read
    # asks the low-level runtime which version of the OCI specification it supports
    oci_version: Callable[[], str] = str
    state: str = ""  # the state directory; "" for none
    moved: tuple[Mount, ...] = ()  # mounts of the spec that become files of a layer

    def mounts(self) -> list[dict[str, Any]]:
        """Return the mounts that will cover parts of the image.

        Raises:
            MalformedSpec: the mounts are not a list of objects.
        """
        return applied.without(parts(self.spec, "mounts", dict), self.moved)

    def variables(self) -> dict[str, str]:
        """Return the variables as the container's processes will see them."""
        return variables_of(self.spec)


class Check:
    """Edits a spec, and rejects edits that go beyond the bounds of their contributions."""

    def __init__(
        self,
        spec: Mapping[str, Any],
        contributions: tuple[Contribution, ...],
        staging: str,
        rootfs: str,
    ) -> None:
        self._spec = spec
        # Compare with an independent copy, because editing must not change the original.
        self._before = marshal.dumps(dict(spec))
        self._bounds = Bounds(source_roots=(staging,))
        for each in contributions:
            verify_bounds(each, (rootfs,))
            self._bounds |= each.bounds
        self._rootfs = rootfs

    def edited(self, plan: Plan, layered: tuple[Mount, ...]) -> dict[str, Any]:
        """Return the spec with a plan's edits, and without mounts whose files are in a layer.

        Raises:
            SpecError: an edit cannot be made, or the result breaks an invariant.
        """
        edited = apply(self._spec, plan, layered)
        before = marshal.loads(self._before)  # noqa: S302 - our own, of a moment ago
        verify(before, edited, plan, self._bounds, (self._rootfs,), layered=layered)
        return edited


def contribute(
    case: Case, grant: Grant | None, layout: Layout
) -> tuple[tuple[Contribution, ...], Compat]:
    """Return what each source gives the container, and the decision about the image's own libcuda.

    Args:
        grant: the GPUs; None if the driver is not requested.

    Raises:
        InventoryError: the driver or a device cannot be used.
        CdiError: a CDI device is unknown, or its spec asks for something impossible.
        RuntimeUnasked: the runtime's version is needed, but ``oci_version`` does not return it.
    """
    compat = Compat()
    found: list[Contribution] = []
    if grant is not None and case.inventory is not None:
        if not isinstance(case.request.devices, Void):
            plan = make_plan(grant, case.inventory, layout)
            compat = _compat_of(case, case.inventory, grant, plan, layout)
            bounds = Bounds(case.inventory.nodes.majors, case.inventory.sources)
            found.append(Contribution(with_compat(plan, compat), bounds))
        if case.request.features or case.request.imex_channels != ():
            given = {device.path for each in found for device in each.plan.devices}
            found.append(
                features.contribute(case.request, case.inventory, layout, case.config, given)
            )
    elif case.request.wants_driver:
        found.append(platforms.contribute(case.spec, case.request, case.config, layout))
    if calls_of(case.spec):
        # Here, as below: most containers have no such hook.
        from hooks.cdi import nvidia_hooks  # noqa: PLC0415

        # A decision by the inventory has more information than a hook.
        find = None if compat.why else _compat_finder(case.image, layout)
        of_hooks, decided = nvidia_hooks.contribute(case.spec, case.config, find)
        found.append(of_hooks)
        compat = compat if compat.why else decided
    found += _of_others(case, layout)
    return tuple(_with_covers(each, case, layout) for each in found), compat


def _with_covers(contribution: Contribution, case: Case, layout: Layout) -> Contribution:
    """Return a contribution that mounts its libraries over empty files of the image, too."""
    plan = contribution.plan
    if case.image is None or not plan.libraries:
        return contribution
    covers = empty_libraries.covers
    if plan.mounts:
        more = covers(plan, case.image, layout, case.variables())
        return replace(contribution, plan=replace(plan, mounts=(*plan.mounts, *more)))
    # An engine has mounted them. It is safe to repeat those that we would also make.
    driver = case.inventory.driver.libraries if case.inventory is not None else ()
    there = applied.driver_mounts(case.spec, {library.source for library in driver})
    more = covers(replace(plan, mounts=there), case.image, layout, case.variables())
    bounds = contribution.bounds | Bounds(source_roots=tuple({mount.source for mount in more}))
    return replace(contribution, plan=replace(plan, mounts=more), bounds=bounds)


def _compat_of(
    case: Case, inventory: Inventory, grant: Grant, plan: Plan, layout: Layout
) -> Compat:
    if case.image is None or not case.config.cuda_compat:
        return Compat()
    gpus = (*grant.gpus, *(inventory.gpus[device.gpu] for device in grant.mig_devices))
    host = host_of(inventory.driver.version, inventory.cuda_version, gpus)
    return find_compat(case.image, plan, layout, host, inventory.driver.arch)


def _of_others(case: Case, layout: Layout) -> tuple[Contribution, ...]:
    """Return what other vendors and CDI specs give the container."""
    request, config = case.request, case.config
    if not (request.cdi_devices or request.amd_devices or request.intel_devices):
        return ()
    # Imported here because this is half of the engine (with a YAML parser). The first container of
    # a node starts before a fork server has loaded everything, so it waits for imports.
    from hooks import vendors  # noqa: PLC0415

    if not request.cdi_devices:
        return vendors.contribute(request, config)
    from hooks.cdi import applying, registry  # noqa: PLC0415

    resolved = registry.resolve(
        request.cdi_devices,
        config.cdi_spec_dirs,
        builtin=vendors.known_kind,
        state=case.state,
    )
    of_vendors = vendors.contribute(request, config, resolved.left)
    if not resolved.devices:
        return of_vendors
    of_specs = applying.contribute(
        resolved,
        config=config,
        user=_user(case.spec),
        oci_version=case.oci_version,
        find_compat=_compat_finder(case.image, layout),
    )
    return (*of_vendors, of_specs)


def _compat_finder(image: Rootfs | None, layout: Layout) -> Callable[[Plan, Host], Compat] | None:
    """Return a function that decides if the image's libcuda comes first; None without an image."""
    arches = arches_of(None, None)
    if image is None or not arches:
        return None
    return lambda plan, host: find_compat(image, plan, layout, host, arches[0])


def _user(spec: Mapping[str, Any]) -> tuple[int, int]:
    """User and group of the container's process; read_request checked that it is one."""
    user = spec["process"].get("user") or {}
    uid, gid = (user.get(name) if isinstance(user, dict) else None for name in ("uid", "gid"))
    return (uid if isinstance(uid, int) else 0, gid if isinstance(gid, int) else 0)
