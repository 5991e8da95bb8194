"""Modules loaded, nodes and links made; what was done, row by row.

===========  =========================================================================
state        of a module, a node or a link
===========  =========================================================================
present      it was there, and is what it should be
made         it was not there, and is now; of a module: it was loaded
absent       it is not there, and would be made (a dry run)
unavailable  its kernel module is not loaded, so there is nothing to make
forbidden    the kernel module's parameter ModifyDeviceFiles keeps others from making it
failed       it is wrong and is not ours to mend, or could not be made; the reason is told
===========  =========================================================================

What is there is never touched, but for a link that leads nowhere or astray.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hooks.config import Config
from hooks.node.device_nodes import look_at_node, read_majors
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


class State:
    """The words of this module's head."""

    PRESENT: Final = "present"
    MADE: Final = "made"
    ABSENT: Final = "absent"
    UNAVAILABLE: Final = "unavailable"
    FORBIDDEN: Final = "forbidden"
    FAILED: Final = "failed"


@dataclass(frozen=True, slots=True)
class Step:
    """What came of one module, node or link."""

    kind: str  # "module", "node" or "link"
    path: str  # of the node or link, on the host; the name of a module
    numbers: str  # "MAJOR:MINOR"; "" for a module, and where the major is not known
    state: str  # of State
    reason: str = ""  # what stands in the way; "" if nothing does


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be made."""

    modules: bool = False  # whether kernel modules are loaded first
    nodes: bool = True  # whether nodes are made
    links: bool = True  # whether links in dev/char are made
    control_only: bool = False  # nodes that belong to no GPU and no capability, and no others
    link_dev: str = ""  # the directory whose char has the links, if it is not that of the nodes
    dry_run: bool = False  # whether nothing is done


def create(
    config: Config, wish: Wish, run: Callable[[Sequence[str]], str] | None = None
) -> list[Step]:
    """Make what is missing.

    Args:
        config: where procfs, sysfs and the device nodes are.
        wish: what is to be made.
        run: runs a command and says why it failed, or ""; by default :func:`run_command`.

    Returns:
        What came of each, in the order in which they were made.

    Raises:
        ModulesNotLoaded: the driver's own module could not be loaded. No node has been made.
    """
    steps = _load(config, wish, run or run_command) if wish.modules else []
    wanted = expected_nodes(config, control_only=wish.control_only)
    if wish.nodes:
        steps += _make(config, wanted, dry_run=wish.dry_run)
    if wish.links:
        steps += _link(config, wish, wanted)
    return steps


def refuse_failures(steps: Sequence[Step]) -> None:
    """Say it if not everything is there that could be.

    Raises:
        DevicesNotMade: something could not be made, or no driver is loaded at all.
    """
    failed = [step for step in steps if step.state == State.FAILED]
    if failed:
        raise DevicesNotMade(
            f"{len(failed)} of {len(steps)} modules, nodes and links",
            found="; ".join(f"{step.path}: {step.reason}" for step in failed[:_MOST_TOLD]),
            do="remove what is in the way, or see why it cannot be made",
        )
    nodes = [step for step in steps if step.kind == "node"]
    if nodes and all(step.state == State.UNAVAILABLE for step in nodes):
        raise DevicesNotMade(
            "device nodes of NVIDIA's driver",
            found=nodes[0].reason,
            do="load it: --load-kernel-modules",
        )


def run_command(command: Sequence[str]) -> str:
    """Run a command with nothing of our environment.

    Returns:
        Why it failed; "" if it did not.
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


def _load(config: Config, wish: Wish, run: Callable[[Sequence[str]], str]) -> list[Step]:
    capabilities = CAPABILITIES
    commands = load_commands(replace(config, load_modules=True), capabilities)
    missing = {command[-1]: command for command in commands}
    steps = []
    for name in dict.fromkeys(MODULES.values()):
        command = missing.get(name)
        if command is None:
            if is_loaded(config, name):
                steps.append(Step("module", name, "", State.PRESENT))
            continue
        if wish.dry_run:
            steps.append(Step("module", name, "", State.ABSENT))
            continue
        why = run(command)
        if why and name == DRIVER:
            raise ModulesNotLoaded(
                f"to load the kernel module {name}: {' '.join(command)}",
                found=why,
                do="see dmesg, and that the module is built for this kernel",
            )
        # Without the others there are fewer nodes; those that there are work.
        steps.append(Step("module", name, "", State.FAILED if why else State.MADE, why))
    return steps


def _make(config: Config, wanted: Sequence[Wanted], *, dry_run: bool) -> list[Step]:
    majors = read_majors(config)
    before = {node.path: _look(config, node, majors) for node in wanted}
    able = [node for node in wanted if before[node.path].state == State.ABSENT]
    if dry_run or not able:
        return list(before.values())
    failed = dict(make_all(config, able).failed)
    after = {}
    for node in able:
        seen = _look(config, node, majors)
        if seen.state == State.PRESENT:
            after[node.path] = _with_state(seen, State.MADE)
        else:
            why = failed.get(seen.path, seen.reason or "it is not there")
            after[node.path] = _with_state(seen, State.FAILED, why)
    return [after.get(path, step) for path, step in before.items()]


def _with_state(step: Step, state: str, reason: str = "") -> Step:
    return Step(step.kind, step.path, step.numbers, state, reason)


def _look(config: Config, node: Wanted, majors: dict[str, int]) -> Step:
    """What there is of a node."""
    host = _host(config, node.path)
    major = next((majors[driver] for driver in node.drivers if driver in majors), None)
    numbers = "" if major is None else f"{major}:{node.minor}"
    if major is None:
        why = f"{config.proc}/devices lists no {node.drivers[0]}: its kernel module is not loaded"
        return Step("node", host, numbers, State.UNAVAILABLE, why)
    seen = look_at_node(config, node.path, {major}, node.minor, node.drivers[0])
    if isinstance(seen, Node):
        return Step("node", host, numbers, State.PRESENT)
    if os.path.lexists(host):
        return Step("node", host, numbers, State.FAILED, seen)
    module = MODULES.get(node.path)
    # The driver's own major is there without this module, and the node would be dead.
    if module is not None and not is_loaded(config, module):
        why = f"the kernel module {module} is not loaded"
        return Step("node", host, numbers, State.UNAVAILABLE, why)
    if is_forbidden(config):
        return Step("node", host, numbers, State.FORBIDDEN, "ModifyDeviceFiles: 0")
    return Step("node", host, numbers, State.ABSENT)


def _host(config: Config, path: str) -> str:
    return config.dev + path.removeprefix("/dev")


# Links


def _link(config: Config, wish: Wish, wanted: Iterable[Wanted]) -> list[Step]:
    dev = wish.link_dev or config.dev
    steps = []
    for device, host in _devices(config, wish, wanted):
        name = f"{device.major}:{device.minor}"
        path = os.path.join(dev, "char", name)
        if is_linked(dev, device):
            steps.append(Step("link", path, name, State.PRESENT))
        elif wish.dry_run:
            steps.append(Step("link", path, name, State.ABSENT))
        else:
            hosts = {device.path: host} if wish.link_dev else None
            done = link_nodes(dev, [device], hosts)
            failed = dict(done.failed).get(name, "")
            state = State.FAILED if failed else State.MADE if done.made else State.PRESENT
            steps.append(Step("link", path, name, state, failed))
    return steps


def _devices(config: Config, wish: Wish, wanted: Iterable[Wanted]) -> Iterator[tuple[Device, str]]:
    """The devices that are to have links, each with its node on the host."""
    paths = [node.path for node in wanted]
    if not wish.control_only:
        paths += _others(config)
    majors = {number for name, number in read_majors(config).items() if name.startswith("nvidia")}
    absent = {node.path: node for node in wanted} if wish.dry_run and wish.nodes else {}
    known = read_majors(config)
    for path in dict.fromkeys(paths):
        seen = look_at_node(config, path, majors, None, "nvidia")
        if isinstance(seen, Node):
            yield Device(path, seen.major, seen.minor), seen.host
        elif path in absent and _look(config, absent[path], known).state == State.ABSENT:
            node = absent[path]
            major = next(known[driver] for driver in node.drivers if driver in known)
            yield Device(path, major, node.minor), _host(config, path)


_BESIDE: Final = ("nvidia-caps", "nvidia-caps-imex-channels")


def _others(config: Config) -> list[str]:
    """Nodes of the driver that are there, whoever made them."""
    found = [f"/dev/{name}" for name in sorted(read_names(config.dev) or ()) if _is_ours(name)]
    for directory in _BESIDE:
        names = read_names(f"{config.dev}/{directory}") or ()
        found += [f"/dev/{directory}/{name}" for name in sorted(names)]
    return found


def _is_ours(name: str) -> bool:
    return name.startswith("nvidia") and name not in _BESIDE
