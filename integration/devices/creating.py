"""Load kernel modules, make device nodes and links, and report each step.

===========  =========================================================================
state        of a module, a node or a link
===========  =========================================================================
present      it existed, and is correct
made         it was missing or stale, and was made; a module was loaded
absent       it is missing or stale, and would be made (a dry run)
unavailable  its kernel module is not loaded, so it cannot be made
forbidden    the kernel module's parameter ModifyDeviceFiles keeps others from making it
failed       it is wrong and not ours to repair, or could not be made; see the reason
===========  =========================================================================

A node is stale if its number differs from what the kernel says. Other files are never changed,
except links with a missing or wrong target.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from api.values import dataclass, replace
from hooks.config import Config
from hooks.node.device_nodes import is_device, look_at_node, read_majors
from hooks.node.fingerprint import read_names
from hooks.node.host_setup import (
    DRIVER,
    TIMEOUT,
    Wanted,
    is_linked,
    is_loaded,
    link_nodes,
    load_commands,
    make_all,
)
from hooks.plan import Device
from hooks.words import CAPABILITIES, Node
from integration.devices.errors import DevicesNotMade, ModulesNotLoaded
from integration.devices.expected import MODULES, expected_nodes, is_forbidden
from integration.driver_programs import run_for

_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SHORT: Final = 200
_MOST_TOLD: Final = 4


class StepState:
    """The states in this module's docstring."""

    PRESENT: Final = "present"
    MADE: Final = "made"
    ABSENT: Final = "absent"
    UNAVAILABLE: Final = "unavailable"
    FORBIDDEN: Final = "forbidden"
    FAILED: Final = "failed"


@dataclass(frozen=True, slots=True)
class Step:
    """The result for one module, node or link."""

    kind: str  # "module", "node" or "link"
    path: str  # of the node or link, on the host; the name of a module
    numbers: str  # "MAJOR:MINOR"; "" for a module, and where the major is not known
    state: str  # one of StepState
    reason: str = ""  # why it is not as wanted; "" if it is


@dataclass(frozen=True, slots=True)
class CreateOptions:
    """What to make."""

    modules: bool = False  # load kernel modules first
    nodes: bool = True
    links: bool = True  # make links in dev/char
    control_only: bool = False  # only nodes that belong to no GPU and no capability
    dry_run: bool = False  # change nothing


def create(
    config: Config, options: CreateOptions, run: Callable[[Sequence[str]], str] | None = None
) -> list[Step]:
    """Create what is missing.

    Args:
        config: where procfs, sysfs and the device nodes are.
        options: what to make.
        run: runs a command and says why it failed, or ""; by default :func:`run_command`.

    Returns:
        The steps, in order.

    Raises:
        ModulesNotLoaded: the driver's own module could not be loaded. No node was created.
    """
    steps = _load(config, options, run or run_command) if options.modules else []
    wanted = expected_nodes(config, control_only=options.control_only)
    if options.nodes:
        steps += _make(config, wanted, dry_run=options.dry_run)
    if options.links:
        steps += _link(config, options, wanted)
    return steps


def refuse_failures(steps: Sequence[Step]) -> None:
    """Raise an error if not all steps succeeded.

    Raises:
        DevicesNotMade: a step failed, or no driver is loaded.
    """
    failed = [step for step in steps if step.state == StepState.FAILED]
    if failed:
        raise DevicesNotMade(
            f"{len(failed)} of {len(steps)} modules, nodes and links",
            found="; ".join(f"{step.path}: {step.reason}" for step in failed[:_MOST_TOLD]),
            do="fix the reason given for each, and run it again",
        )
    nodes = [step for step in steps if step.kind == "node"]
    if nodes and all(step.state == StepState.UNAVAILABLE for step in nodes):
        raise DevicesNotMade(
            "device nodes of NVIDIA's driver",
            found=nodes[0].reason,
            do="load it: --load-kernel-modules",
        )


def run_command(command: Sequence[str]) -> str:
    """Run a command with a fixed environment.

    Returns:
        Why the command failed; "" if it succeeded.
    """
    try:
        done = run_for(command, TIMEOUT, env={"PATH": _PATH, "LANG": "C.UTF-8"})
    except subprocess.TimeoutExpired:
        return f"it took more than {TIMEOUT:.0f} s"
    except OSError as error:
        return error.strerror or str(error)
    if done.returncode == 0:
        return ""
    return done.stderr.decode(errors="replace")[:_SHORT].strip() or f"status {done.returncode}"


def _load(
    config: Config, options: CreateOptions, run: Callable[[Sequence[str]], str]
) -> list[Step]:
    capabilities = CAPABILITIES
    commands = load_commands(replace(config, load_modules=True), capabilities)
    missing = {command[-1]: command for command in commands}
    steps = []
    for name in dict.fromkeys(MODULES.values()):
        command = missing.get(name)
        if command is None:
            if is_loaded(config, name):
                steps.append(Step("module", name, "", StepState.PRESENT))
            continue
        if options.dry_run:
            steps.append(Step("module", name, "", StepState.ABSENT))
            continue
        why = run(command)
        if why and name == DRIVER:
            raise ModulesNotLoaded(
                f"to load the kernel module {name}: {' '.join(command)}",
                found=why,
                do="see dmesg, and check that the module is built for this kernel",
            )
        # The other modules only add nodes; the driver works without them.
        steps.append(Step("module", name, "", StepState.FAILED if why else StepState.MADE, why))
    return steps


def _make(config: Config, wanted: Sequence[Wanted], *, dry_run: bool) -> list[Step]:
    majors = read_majors(config)
    before = {node.path: _look(config, node, majors) for node in wanted}
    able = [node for node in wanted if before[node.path].state == StepState.ABSENT]
    if dry_run or not able:
        return list(before.values())
    failed = dict(make_all(config, able).failed)
    after = {}
    for node in able:
        seen = _look(config, node, majors)
        if seen.state == StepState.PRESENT:
            after[node.path] = _with_state(seen, StepState.MADE)
        else:
            why = failed.get(seen.path, seen.reason or "it is not there")
            after[node.path] = _with_state(seen, StepState.FAILED, why)
    return [after.get(path, step) for path, step in before.items()]


def _with_state(step: Step, state: str, reason: str = "") -> Step:
    return Step(step.kind, step.path, step.numbers, state, reason)


def _look(config: Config, node: Wanted, majors: dict[str, int]) -> Step:
    """Return the present state of a node."""
    host = _host(config, node.path)
    major = next((majors[driver] for driver in node.drivers if driver in majors), None)
    numbers = "" if major is None else f"{major}:{node.minor}"
    if major is None:
        why = f"{config.proc}/devices lists no {node.drivers[0]}: its kernel module is not loaded"
        return Step("node", host, numbers, StepState.UNAVAILABLE, why)
    seen = look_at_node(config, node.path, {major}, node.minor, node.drivers[0])
    if isinstance(seen, Node):
        return Step("node", host, numbers, StepState.PRESENT)
    is_stale = os.path.lexists(host)
    if is_stale and (is_forbidden(config) or not is_device(host)):
        return Step("node", host, numbers, StepState.FAILED, seen)
    module = MODULES.get(node.path)
    # The driver's major exists without this module, but the node would not work.
    if module is not None and not is_loaded(config, module):
        why = f"the kernel module {module} is not loaded"
        return Step("node", host, numbers, StepState.UNAVAILABLE, why)
    if is_forbidden(config):
        return Step("node", host, numbers, StepState.FORBIDDEN, "ModifyDeviceFiles: 0")
    return Step("node", host, numbers, StepState.ABSENT, seen if is_stale else "")


def _host(config: Config, path: str) -> str:
    return config.dev + path.removeprefix("/dev")


# Links


def _link(config: Config, options: CreateOptions, wanted: Iterable[Wanted]) -> list[Step]:
    dev = config.dev
    steps = []
    for device in _devices(config, options, wanted):
        name = f"{device.major}:{device.minor}"
        path = os.path.join(dev, "char", name)
        if is_linked(dev, device):
            steps.append(Step("link", path, name, StepState.PRESENT))
        elif options.dry_run:
            steps.append(Step("link", path, name, StepState.ABSENT))
        else:
            done = link_nodes(dev, [device])
            failed = dict(done.failed).get(name, "")
            state = (
                StepState.FAILED if failed else StepState.MADE if done.made else StepState.PRESENT
            )
            steps.append(Step("link", path, name, state, failed))
    return steps


def _devices(config: Config, options: CreateOptions, wanted: Iterable[Wanted]) -> Iterator[Device]:
    """Yield the devices to link."""
    paths = [node.path for node in wanted]
    if not options.control_only:
        paths += _others(config)
    majors = {number for name, number in read_majors(config).items() if name.startswith("nvidia")}
    absent = {node.path: node for node in wanted} if options.dry_run and options.nodes else {}
    known = read_majors(config)
    for path in dict.fromkeys(paths):
        seen = look_at_node(config, path, majors, None, "nvidia")
        if isinstance(seen, Node):
            yield Device(path, seen.major, seen.minor)
        elif path in absent and _look(config, absent[path], known).state == StepState.ABSENT:
            node = absent[path]
            major = next(known[driver] for driver in node.drivers if driver in known)
            yield Device(path, major, node.minor)


_DIRECTORIES: Final = ("nvidia-caps", "nvidia-caps-imex-channels")


def _others(config: Config) -> list[str]:
    """Return the driver's nodes that exist, whatever program made them."""
    found = [f"/dev/{name}" for name in sorted(read_names(config.dev) or ()) if _is_nvidia(name)]
    for directory in _DIRECTORIES:
        names = read_names(f"{config.dev}/{directory}") or ()
        found += [f"/dev/{directory}/{name}" for name in sorted(names)]
    return found


def _is_nvidia(name: str) -> bool:
    return name.startswith("nvidia") and name not in _DIRECTORIES
