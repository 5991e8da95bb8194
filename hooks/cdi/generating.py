"""Generate a CDI spec of NVIDIA's devices, without hooks, for other runtimes.

The spec has the edits that a container would get from us, planned device by device. If a spec
cannot express a part of the plan, it is replaced or left out:

======================================  =====================================================
in a plan                               in the spec
======================================  =====================================================
a library, where the image's loader     mounted in every directory that the loader of a common
looks                                   image searches by default (:data:`DIRECTORIES`): so it
                                        is found without a cache, and without a hook
links of a library                      the library, mounted by the names that programs ask
                                        for: its soname, and a few others. Each mount costs a
                                        start as much as everything else of a library, so it is
                                        not mounted by its file's name or by linkers' names
entries of ld.so.cache                  nothing: the directories above are searched without
a manifest without the host's paths     the host's manifest, and the library where it names it:
                                        a spec has no word for a file's content
/dev/dri/by-path, the application       nothing: they are there for programs that look at all
profile, parameters of procfs           GPUs, and a spec has no word for them
a group for nodes that are not          ``additionalGids``
everybody's
======================================  =====================================================

NVIDIA_VISIBLE_DEVICES is set to ``void``, as in NVIDIA's specs: if a container has a GPU from such
a spec, it must not get one again because of its image's environment, from us or from NVIDIA's
runtime.

====================  =============================  ==================================
kind                  names                          what
====================  =============================  ==================================
gpu                   index, UUID, ``gpu0``,         GPUs and MIG devices, driver files.
                      ``mig0:1``; ``all``            A MIG device's UUID of drivers before 470
                                                     has slashes, and is no name in CDI
gds, mofed, gdrcopy,  ``all``                        :mod:`hooks.edits.features`
nvswitch
imex-channel          numbers, ``all``               IMEX channels
management            ``all``                        every node, and driver files
====================  =============================  ==================================

Source: NVIDIA Container Toolkit, pkg/nvcdi, for kinds and names; ld.so(8).
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from api.values import dataclass, replace
from hooks.cdi import schema
from hooks.cdi.errors import CdiNotGenerated
from hooks.cdi.spec import DeviceNode, Edits, SpecDevice, SpecFile, SpecMount, fault_of
from hooks.cdi.tree import VERSIONS
from hooks.config import Config
from hooks.edits import features
from hooks.edits.grant import Grant, decide
from hooks.edits.planning import arches_of, make_plan, plan_devices
from hooks.image.layout import Layout, Libc, Loader
from hooks.node.capabilities import ConfigFile, every_row
from hooks.node.driver import Driver
from hooks.node.gpus import Gpu, MigDevice
from hooks.node.inventory import Inventory
from hooks.node.manifests import library_paths
from hooks.plan import Device, Mount, Plan, groups_of, united
from hooks.requests.naming import parse_names
from hooks.requests.request import Request
from hooks.words import (
    CAPABILITIES,
    AllDevices,
    Arch,
    Capability,
    Devices,
    Feature,
    NoDevices,
    Void,
    end_of,
)

DIRECTORIES: Final = {
    Arch.X86_64: ("/usr/lib/x86_64-linux-gnu", "/usr/lib64"),
    Arch.AARCH64: ("/usr/lib/aarch64-linux-gnu", "/usr/lib64"),
    Arch.I386: ("/usr/lib/i386-linux-gnu", "/usr/lib32"),
    Arch.ARM: ("/usr/lib/arm-linux-gnueabihf", "/usr/lib32"),
}
"""Those of Debian and its derivatives, and those of other distributions."""

DEFAULT_CAPABILITIES: Final = CAPABILITIES - {Capability.COMPAT32}
"""Like NVIDIA's own specs, without 32-bit libraries."""

STRATEGIES: Final = ("index", "uuid", "type-index")
_VOID: Final = ("NVIDIA_VISIBLE_DEVICES", "void")
_ALL: Final = "all"
_NVIDIA: Final = "nvidia.com"

KINDS: Final = {
    "gpu": (_NVIDIA, "gpu"),
    Feature.GDS: (_NVIDIA, "gds"),
    Feature.MOFED: (_NVIDIA, "mofed"),
    Feature.GDRCOPY: (_NVIDIA, "gdrcopy"),
    Feature.NVSWITCH: (_NVIDIA, "nvswitch"),
    "imex-channel": (_NVIDIA, "imex-channel"),
    Feature.MANAGEMENT: (f"management.{_NVIDIA}", "gpu"),
}
"""Vendor and class of each kind of spec."""


@dataclass(frozen=True, slots=True)
class SpecOptions:
    """What a spec describes, and how its devices are named."""

    kind: str = "gpu"
    vendor: str = ""  # in place of the kind's own; "" for that
    class_: str = ""  # in place of the kind's own; "" for that
    strategies: tuple[str, ...] = ("index", "uuid")  # how GPUs are named: words of STRATEGIES
    capabilities: frozenset[str] = DEFAULT_CAPABILITIES
    # directories for libraries; empty for DIRECTORIES
    directories: tuple[str, ...] = ()
    annotations: tuple[tuple[str, str], ...] = ()
    # GPUs and MIG devices to include, as containers name them; empty for all
    devices: tuple[str, ...] = ()
    all_device: bool = True  # whether to add a device ``all`` with the edits of all others
    # whether processes get the groups of nodes that not everyone may open. Runtimes without support
    # for version 0.7.0 of the specification refuse a spec with groups.
    groups: bool = True


def generate(wish: SpecOptions, inventory: Inventory, config: Config) -> SpecFile:
    """Return a spec of the node's devices, in the lowest version with the fields that it uses.

    Raises:
        CdiNotGenerated: the node has no such devices.
        CdiSpecInvalid: the requested vendor, class or annotations are invalid.
        MalformedDevice: a requested device has none of the known forms.
        NoGpus: GPUs are requested but the node has none.
        UnknownDevice: the node has no device with a requested name.
    """
    work = _Work(wish, inventory, config)
    if wish.kind == "gpu":
        devices, common = work.gpus()
    elif wish.kind == "imex-channel":
        devices, common = work.channels(), Edits()
    else:
        devices, common = work.feature(wish.kind), Edits()
    if not wish.groups:
        devices = tuple(replace(each, edits=_without_groups(each.edits)) for each in devices)
        common = _without_groups(common)
    vendor, class_ = KINDS[wish.kind]
    made = SpecFile(
        VERSIONS[-1],
        f"{wish.vendor or vendor}/{wish.class_ or class_}",
        devices,
        common,
        wish.annotations,
    )
    tree = schema.to_tree(made)
    least = schema.minimum_version(tree)
    return schema.parse({**tree, "cdiVersion": least}, "that is being made")


class _Work:
    """A spec under construction."""

    def __init__(self, wish: SpecOptions, inventory: Inventory, config: Config) -> None:
        self._wish = wish
        self._inventory = inventory
        self._config = config

    # GPUs

    def gpus(self) -> tuple[tuple[SpecDevice, ...], Edits]:
        """Return GPUs and MIG devices under all their names, and their common edits."""
        capabilities = self._wish.capabilities
        everything = decide(Request(self._wanted(), capabilities), self._inventory)
        common = self._flat(lambda layout: self._plan(Grant(capabilities), layout))
        known = frozenset(device.path for device in common.devices)
        devices = []
        for gpu in everything.gpus:
            one = Grant(capabilities, gpus=(gpu,))
            devices += self._named(self._names_of_gpu(gpu), one, known)
        for mig in everything.mig_devices:
            one = Grant(capabilities, mig_devices=(mig,))
            devices += self._named(self._names_of_mig(mig), one, known)
        if self._wish.all_device:
            devices += self._named((_ALL,), everything, known)
        return tuple(devices), _edits(common, _VOID)

    def _wanted(self) -> Devices:
        """Return the GPUs and MIG devices that the spec should contain."""
        if not self._wish.devices:
            return AllDevices()
        asked = f"a CDI spec of the devices {', '.join(self._wish.devices)}"
        names = parse_names(self._wish.devices, asked=asked)
        others = names.cdi_devices or names.features or names.imex_channels != ()
        if others or isinstance(names.devices, NoDevices | Void):
            found = "not all of these are GPUs or MIG devices" if others else "these are no devices"
            raise CdiNotGenerated(asked, found=found, do="name GPUs and MIG devices, or all")
        return names.devices

    def _named(self, names: Iterable[str], grant: Grant, known: frozenset[str]) -> list[SpecDevice]:
        """Return a device under each of its names, without the edits that all devices share."""
        devices = plan_devices(grant, self._inventory)
        own = tuple(device for device in devices if device.path not in known)
        edits = Edits(device_nodes=tuple(map(_node, own)), additional_gids=tuple(groups_of(own)))
        return [SpecDevice(name, edits) for name in names]

    def _names_of_gpu(self, gpu: Gpu) -> list[str]:
        by = {"index": str(gpu.index), "uuid": gpu.uuid, "type-index": f"gpu{gpu.index}"}
        return [by[each] for each in self._wish.strategies if by[each]]

    def _names_of_mig(self, device: MigDevice) -> list[str]:
        number = f"{device.gpu}:{device.index}"
        by = {"index": number, "uuid": device.uuid, "type-index": f"mig{number}"}
        return [by[each] for each in self._wish.strategies if not fault_of("device", by[each])]

    def _plan(self, grant: Grant, layout: Layout) -> Plan:
        return make_plan(grant, self._inventory, layout)

    # Everything else

    def feature(self, feature: str) -> tuple[SpecDevice, ...]:
        """Return the edits of a feature as one device."""
        request = Request(Void(), features=frozenset({feature}))
        plan = self._flat(lambda layout: self._beside(request, layout))
        if not plan.devices:
            raise self._nothing(plan)
        variables = (_VOID,) if feature == Feature.MANAGEMENT else ()
        return (SpecDevice(_ALL, _edits(plan, *variables)),)

    def channels(self) -> tuple[SpecDevice, ...]:
        """Return each IMEX channel, and all of them, as devices."""
        plan = self._flat(lambda layout: self._beside(Request(Void(), imex_channels=None), layout))
        if not plan.devices:
            raise self._nothing(plan)
        one_by_one = [
            SpecDevice(
                str(device.minor),
                _edits(replace(plan, devices=(device,), additional_gids=groups_of((device,)))),
            )
            for device in plan.devices
        ]
        return (*one_by_one, SpecDevice(_ALL, _edits(plan)))

    def _beside(self, request: Request, layout: Layout) -> Plan:
        return features.contribute(request, self._inventory, layout, self._config).plan

    def _nothing(self, plan: Plan) -> CdiNotGenerated:
        sought = ", ".join(missing.what for missing in plan.missing)
        return CdiNotGenerated(
            f"a CDI spec of {self._wish.kind}",
            found=f"the node has none of {sought}" if sought else "the node has nothing of it",
            do="see that its driver is loaded",
        )

    # Layouts

    def _flat(self, make: Callable[[Layout], Plan]) -> Plan:
        """Return one plan for all directories of libraries, with mounts in place of links."""
        layouts = self._layouts(Grant(self._wish.capabilities))
        plan = _without_links(_for_all([make(layout) for layout in layouts]))
        return _with_manifests(plan, self._inventory.driver)

    def _layouts(self, grant: Grant) -> list[Layout]:
        """Return a layout for each directory that the loaders of images search."""
        native, *others = arches_of(grant, self._inventory)
        choices = {native: self._wish.directories or DIRECTORIES[native]}
        choices |= {arch: DIRECTORIES[arch] for arch in others}
        longest = max(len(choice) for choice in choices.values())
        return [
            Layout(
                tuple(
                    Loader(arch, Libc.GLIBC, choice[min(turn, len(choice) - 1)])
                    for arch, choice in choices.items()
                )
            )
            for turn in range(longest)
        ]


def _for_all(plans: Sequence[Plan]) -> Plan:
    """Unite the plans for several directories; their variable then names all directories."""
    plan = united(plans)
    variables: dict[str, dict[str, None]] = {}
    for name, value in plan.environment:
        variables.setdefault(name, {})[value] = None
    # They differ only in NVIDIA_CTK_LIBCUDA_DIR, a list of directories.
    told = tuple((name, ":".join(values)) for name, values in variables.items())
    return replace(plan, environment=told)


def _without_groups(edits: Edits) -> Edits:
    return replace(edits, additional_gids=())


# Programs find a library or module by these links, not by the name of its file.
_FINDING: Final = frozenset({"soname", "X module"})
# Names for linkers that programs also open.
_OPENED: Final = frozenset({"libcuda.so", "libnvidia-ml.so", "libnvidia-opticalflow.so"})
# Libraries whose file name shows the driver's version to containers that look for it.
_TELLING: Final = ("libcuda.so.", "libnvidia-ml.so.")


def _without_links(plan: Plan) -> Plan:
    """Return the plan with mounts, instead of links, for the names that programs ask for."""
    at = {mount.destination: mount for mount in plan.mounts}
    links = {link.path: link.target for link in plan.links}
    ends = {link.path: end_of(link.path, links) for link in plan.links}
    found = {ends[link.path] for link in plan.links if link.reason in _FINDING}
    mounts = {
        path: mount
        for path, mount in at.items()
        if path not in found or posixpath.basename(path).startswith(_TELLING)
    }
    for path, end in ends.items():
        if end in at and not (end in found and _is_for_linkers(path, end)):
            mounts.setdefault(path, replace(at[end], destination=path))
    return replace(plan, mounts=tuple(mounts.values()), links=())


def _with_manifests(plan: Plan, driver: Driver) -> Plan:
    """Return the plan with the host's manifests, and libraries at the paths that these name."""
    at = {mount.destination: mount for mount in plan.mounts}
    arches = {library.source: library.arch for library in driver.libraries}
    libraries = {(posixpath.basename(p), arches.get(m.source)): m for p, m in at.items()}
    arch_of = {row.name: row.arch for row in every_row() if isinstance(row, ConfigFile)}
    # A host file may have several destinations.
    changed = {file.path: file.source for file in plan.files if file.source}
    for where, source in changed.items():
        at[where] = Mount(source, where, reason="configuration")
    for file in driver.files:
        if file.source not in changed.values():
            continue
        arch = arch_of[file.row] or driver.arch
        for path in library_paths(file.name, file.manifest):
            library = libraries.get((posixpath.basename(path), arch))
            if library is not None and path.startswith("/"):
                at.setdefault(path, replace(library, destination=path))
    return replace(plan, mounts=tuple(at.values()))


def _is_for_linkers(path: str, end: str) -> bool:
    """Whether only linkers, and not programs, use this name next to a library."""
    directory, name = posixpath.split(path)
    is_sibling = directory == posixpath.dirname(end)
    return is_sibling and name.endswith(".so") and name not in _OPENED and "/xorg/" not in path


def _edits(plan: Plan, *variables: tuple[str, str]) -> Edits:
    env = [f"{name}={value}" for name, value in (*plan.environment, *variables)]
    return Edits(
        env=tuple(env),
        device_nodes=tuple(map(_node, plan.devices)),
        mounts=tuple(map(_mount, plan.mounts)),
        additional_gids=tuple(plan.additional_gids),
    )


def _node(device: Device) -> DeviceNode:
    return DeviceNode(
        path=device.path,
        kind=device.kind,
        major=device.major,
        minor=device.minor,
        mode=device.mode,
        permissions=device.access,
        uid=device.uid,
        gid=device.gid,
    )


def _mount(mount: Mount) -> SpecMount:
    return SpecMount(mount.source, mount.destination, mount.options)
