"""Checks of GPUs in containers, from inside.

Each check reports what it saw. A simulated node has no kernel module, so checks that need one are
"not possible" there. But the driver must be loaded and say so: libcuda that it has no device, and a
node that may be opened must return ENXIO.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from hooks.config import Config
from hooks.node.capabilities import CONTROL
from hooks.node.gpus import Gpu
from hooks.node.inventory import Inventory
from integration.containers import traces
from tools.containerd import Completed
from tools.errors import CheckNotPossible
from tools.gpu.containers import TIMEOUT, Container, Containers, asking
from tools.gpu.report import Report, failed, not_possible

_UUID: Final = re.compile(r"\(UUID: ((?:GPU|MIG)-[0-9a-f-]+)\)", re.IGNORECASE)
_NO_DEVICE: Final = 100  # CUDA_ERROR_NO_DEVICE
_MOST_REFUSED: Final = 4
_CLEAN_TIMEOUT: Final = 10.0
_POLL: Final = 0.05

SIMULATED: Final = "simulated"


@dataclass(frozen=True, slots=True)
class Subject:
    """What is checked."""

    containers: Containers  # starts containers
    inventory: Inventory  # what the engine found on this node
    config: Config  # where it looked
    simulated: bool  # whether there is no kernel module behind the nodes
    cgroups: str  # why there are no cgroups for containers; "" if there are

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """Return the full GPUs that a container can get."""
        usable = self.inventory.nodes.usable
        return tuple(gpu for gpu in self.inventory.gpus if gpu.path in usable and not gpu.mig)

    @property
    def uuids(self) -> frozenset[str]:
        """Return the UUIDs that ``all`` means: full GPUs and MIG devices."""
        mig = (device.uuid for device in self.inventory.mig_devices)
        return frozenset({*(gpu.uuid for gpu in self.gpus), *mig})

    @property
    def one(self) -> str:
        """Return a request for a single device."""
        return self.gpus[0].uuid if self.gpus else "all"

    def computes(self, done: Completed, expected: Iterable[str], *, otherwise: str = "") -> str:
        """Judge the output of ``gpu cuda``; see :func:`computes`.

        Args:
            expected: the UUIDs of the devices that it should see.
            otherwise: other evidence, which is enough on a simulated node.
        """
        with_mig = bool(self.inventory.mig_devices)
        try:
            return computes(done, expected, simulated=self.simulated, with_mig=with_mig)
        except CheckNotPossible:
            if otherwise:
                return otherwise
            raise

    @property
    def control_major(self) -> int:
        """Return the major number of the GPUs' nodes."""
        return self.inventory.nodes.usable[CONTROL.path].major


def make_checks(subject: Subject, report: Report) -> None:
    """Run all checks except those of single capabilities."""
    containers, check = subject.containers, report.check
    check("a container without a request gets nothing", lambda: _nothing_asked(subject))
    check(
        "nvidia-smi -L lists all GPUs on request",
        lambda: _lists(subject, "all", subject.uuids),
    )
    check("CUDA computes on all GPUs on request", lambda: _computes_on_all(subject))
    for gpu in _first_and_last(subject.gpus):
        for name in (str(gpu.index), gpu.uuid):
            check(
                f"nvidia-smi -L lists only the GPU requested as {name}",
                lambda name=name, gpu=gpu: _lists(subject, name, {gpu.uuid}),  # type: ignore[misc]
            )
        check(
            f"CUDA computes on GPU {gpu.index} alone, and sees no other",
            lambda gpu=gpu: subject.computes(  # type: ignore[misc]
                containers.run("gpu", "cuda", flags=asking(gpu.uuid)), {gpu.uuid}
            ),
        )
        check(
            f"with GPU {gpu.index} alone, its node opens and no other node does",
            lambda gpu=gpu: _reaches_only(subject, gpu),  # type: ignore[misc]
        )
    check("with `none` there is no GPU, and none can be opened", lambda: _none(subject))
    check("with `none` CUDA has no device", lambda: _none_for_cuda(subject))
    check("a GPU that does not exist is refused in one line", lambda: _unknown(subject))
    check("an exec sees the GPUs of its container", lambda: _exec(subject))
    check("a second container uses the GPUs at the same time", lambda: _two(subject))
    check("GPUs still work after `runc update`", lambda: _update(subject))
    check("a removed container leaves nothing", lambda: _leaves_nothing(subject, report))


def answers(done: Completed) -> list[dict[str, Any]]:
    """Parse the output of the program ``gpu``: an object for each line.

    Raises:
        CheckFailed: it printed something else, or nothing.
    """
    try:
        lines: list[dict[str, Any]] = [json.loads(line) for line in done.lines if line[:1] == "{"]
    except ValueError:
        lines = []
    if not lines:
        raise failed(f"{told(done)}")
    return lines


def told(done: Completed) -> str:
    """Return how a program exited and its output, for a message."""
    said = f"{done.stdout.strip()} {done.stderr.strip()}".strip()
    return f"exit code {done.code}: {said or 'no output'}"


def refusal(line: dict[str, Any]) -> str:
    """Return what failed, as text."""
    why = line.get("reason") or f"{line.get('name', '')} ({line.get('code')})".strip()
    return f"{line['failed']}: {why}"


def computes(
    done: Completed, expected: Iterable[str], *, simulated: bool = False, with_mig: bool = False
) -> str:
    """Judge the output of ``gpu cuda``.

    Args:
        expected: the UUIDs of the devices that it should see.
        simulated: whether there is no kernel module that could answer.
        with_mig: whether there are MIG devices on the node.

    Raises:
        CheckFailed: CUDA sees other devices, or computes wrongly, or not.
        CheckNotPossible: on a simulated node CUDA reports that there is no device.
    """
    lines = answers(done)
    last = lines[-1]
    if simulated and last.get("failed") == "cuInit" and last.get("code") == _NO_DEVICE:
        raise not_possible(
            f"{SIMULATED}: libcuda is loaded and returns {last['name']}, as expected"
        )
    if "failed" in last or done.code != 0:
        raise failed(refusal(last) if "failed" in last else told(done))
    head, devices = lines[0], lines[1:]
    wanted, seen = _digits(expected), _digits(device["uuid"] for device in devices)
    # A process sees one MIG device at most, and MIG's devices only after the full ones.
    if head["count"] != len(devices) or not (seen <= wanted if with_mig else seen == wanted):
        raise failed(f"CUDA sees {sorted(seen) or 'no device'}, not {sorted(wanted)}")
    if not devices:
        raise failed("CUDA sees no device")
    wrong = [device["name"] for device in devices if device["wrong"]]
    if wrong:
        raise failed(f"wrong results on {', '.join(wrong)}")
    said = (
        f"{device['name']}: {device['of']} right results of a kernel for {device['target']} "
        f"(context {device['milliseconds']['context']:.0f} ms, "
        f"compiled in {device['milliseconds']['compile']:.0f} ms)"
        for device in devices
    )
    version = head["version"]
    return f"CUDA {version // 1000}.{version % 1000 // 10}; {'; '.join(said)}"


def lists(done: Completed, expected: Iterable[str]) -> str:
    """Judge the output of ``nvidia-smi -L``.

    Args:
        expected: the UUIDs that it should list, and no others.

    Raises:
        CheckFailed: it lists other GPUs.
    """
    seen = {uuid.lower() for uuid in _UUID.findall(done.stdout)}
    wanted = {uuid.lower() for uuid in expected}
    if any(uuid.startswith("mig-") for uuid in seen | wanted):
        # nvidia-smi lists the GPU of a MIG device above it.
        only = {uuid for uuid in seen if uuid.startswith("mig-")}
        same = only == {uuid for uuid in wanted if uuid.startswith("mig-")} and wanted <= seen
    else:
        same = seen == wanted
    if done.code != 0 or not same:
        raise failed(f"asked: {', '.join(sorted(wanted))}; {told(done)}")
    return "; ".join(line.strip() for line in done.lines if "UUID" in line)


def _first_and_last(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    return tuple(dict.fromkeys((*gpus[:1], *gpus[-1:])))


def _digits(uuids: Iterable[str]) -> set[str]:
    return {uuid.lower().removeprefix("gpu-").removeprefix("mig-") for uuid in uuids}


def _nothing_asked(subject: Subject) -> str:
    run = subject.containers.run
    done = run("sh", "-c", "ls /dev | grep -i nvidia; probe dlopen libcuda.so.1 libnvidia-ml.so.1")
    there = [line for line in done.lines if " - " not in line]
    if there or not done.lines:
        raise failed(f"there is {', '.join(there)}" if there else told(done))
    return "no node and no library of the driver"


def _needs_smi(subject: Subject) -> None:
    if not any(file.row == "nvidia-smi" for file in subject.inventory.driver.files):
        raise not_possible("the driver has no nvidia-smi")


def _lists(subject: Subject, devices: str, expected: Iterable[str]) -> str:
    _needs_smi(subject)
    return lists(subject.containers.run("nvidia-smi", "-L", flags=asking(devices)), expected)


def _computes_on_all(subject: Subject) -> str:
    done = subject.containers.run("gpu", "cuda", flags=asking("all"))
    return subject.computes(done, subject.uuids)


def _opened(container: Container, minors: Iterable[int], major: int) -> dict[int, str]:
    """Return the error of open(2) for GPU nodes created inside, by minor number."""
    found = {}
    for minor in minors:
        path = f"/tmp/gpu{minor}"
        script = f"[ -e {path} ] || mknod {path} c {major} {minor} && probe open {path}"
        done = container.exec("sh", "-c", script)
        if done.stdout.startswith(path):
            found[minor] = done.stdout.split()[-1]
        elif "mknod" in done.stderr and "Operation not permitted" in done.stderr:
            found[minor] = "EPERM"  # mknod already failed, as in a user namespace
        else:
            found[minor] = told(done)
    return found


def _reaches_only(subject: Subject, gpu: Gpu) -> str:
    others = [g.minor for g in subject.inventory.gpus if g != gpu]
    # Unused minors must be refused as well; a node with one GPU has only these to check.
    others += [minor for minor in (gpu.minor + 1, gpu.minor + 2) if minor not in others]
    others = others[:_MOST_REFUSED]
    with subject.containers.started(flags=asking(gpu.uuid)) as container:
        shown = container.exec("sh", "-c", "echo /dev/nvidia[0-9]*").stdout.split()
        if shown != [gpu.path]:
            raise failed(f"it has {' '.join(shown)}")
        own = container.exec("probe", "open", gpu.path).stdout.split()[-1:]
        if own != (["ENXIO"] if subject.simulated else ["OK"]):
            raise failed(f"open of {gpu.path}: {' '.join(own) or 'no answer'}")
        _needs_cgroups(subject)
        _all_refused(_opened(container, others, subject.control_major))
    numbers = ", ".join(f"{subject.control_major}:{minor}" for minor in others)
    return f"{gpu.path} opens ({own[0]}); of devices made by mknod {numbers} EPERM"


def _all_refused(opened: dict[int, str]) -> None:
    reached = {minor: answer for minor, answer in opened.items() if answer != "EPERM"}
    if reached:
        raise failed(f"open of devices by minor number: {reached}")


def _needs_cgroups(subject: Subject) -> None:
    if subject.cgroups:
        raise not_possible(
            "its nodes are right; no device cgroup can refuse nodes from mknod: " + subject.cgroups
        )


def _none(subject: Subject) -> str:
    minors = [gpu.minor for gpu in subject.inventory.gpus][:_MOST_REFUSED]
    with subject.containers.started(flags=asking("none")) as container:
        shown = container.exec("sh", "-c", "ls /dev | grep '^nvidia[0-9]'").stdout.split()
        if shown:
            raise failed(f"it has {' '.join(shown)}")
        _needs_cgroups(subject)
        _all_refused(_opened(container, minors, subject.control_major))
    return "no node; EPERM for a node from mknod"


def _none_for_cuda(subject: Subject) -> str:
    last = answers(subject.containers.run("gpu", "cuda", flags=asking("none")))[-1]
    if "failed" not in last:
        raise failed("CUDA sees a device")
    return refusal(last)


def _unknown(subject: Subject) -> str:
    name = "GPU-00000000-1111-2222-3333-444444444444"
    done = subject.containers.run("true", flags=asking(name))
    if done.code == 0 or "NVSHIM-E0202" not in done.stderr:
        raise failed(told(done))
    return done.stderr[done.stderr.index("NVSHIM-E0202") :]


def _exec(subject: Subject) -> str:
    with subject.containers.started(flags=asking("all")) as container:
        _needs_smi(subject)
        said = lists(container.exec("nvidia-smi", "-L"), subject.uuids)
        return subject.computes(container.exec("gpu", "cuda"), subject.uuids, otherwise=said)


def _two(subject: Subject) -> str:
    _needs_smi(subject)
    with ExitStack() as both:
        pair = [
            both.enter_context(subject.containers.started(flags=asking("all"))) for _ in range(2)
        ]
        for container in pair:
            lists(container.exec("nvidia-smi", "-L"), subject.uuids)
        ctr = subject.containers.containerd
        words = [
            ["tasks", "exec", "--exec-id", subject.containers.new_name("e"),
             "--fifo-dir", ctr.fifo_directory, container.name, "gpu", "cuda"]
            for container in pair
        ]  # fmt: skip
        running = [
            ctr.spawn_ctr(*each, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) for each in words
        ]
        try:
            said = [
                process.communicate(timeout=TIMEOUT)[0].decode(errors="replace")
                for process in running
            ]
        finally:
            for process in running:
                process.kill()
                process.wait()
    counts = [text.count('"wrong": 0') for text in said]
    if subject.simulated:
        return "both list all; both at once: " + " / ".join(text.strip() for text in said)
    if not all(counts):
        raise failed(f"of two that computed at the same time: {said}")
    return f"both list all, and compute at the same time on {counts[0]} and {counts[1]} devices"


def _update(subject: Subject) -> str:
    if subject.cgroups:
        raise not_possible(f"no cgroups: {subject.cgroups}")
    containerd = subject.containers.containerd
    root = os.path.join(traces.RUNTIME_STATE, containerd.namespace)
    with subject.containers.started(flags=asking(subject.one)) as container:
        before = container.exec("sh", "-c", "probe open /dev/nvidia*").stdout
        done = subprocess.run(
            [containerd.parts.runc, "--root", root, "update", "--pids-limit", "300",
             container.name],
            capture_output=True, text=True, check=False, timeout=TIMEOUT,
        )  # fmt: skip
        if done.returncode:
            raise not_possible(f"runc update: {done.stderr.strip()}")
        after = container.exec("sh", "-c", "probe open /dev/nvidia*").stdout
        if before != after or not before:
            raise failed(f"before: {before}; after: {after}")
        expected = [gpu.uuid for gpu in subject.gpus[:1]] or subject.uuids
        said = f"its nodes open as before: {after}"
        return subject.computes(container.exec("gpu", "cuda"), expected, otherwise=said)


def _leaves_nothing(subject: Subject, report: Report) -> str:
    containerd = subject.containers.containerd
    before = traces.find(containerd.marks)
    with subject.containers.started(flags=asking("all", "all")) as container:
        container.exec("true")
        report.values["record"] = container.record
        during = traces.find(containerd.marks) - before
    deadline = time.monotonic() + _CLEAN_TIMEOUT
    while left := traces.find(containerd.marks) - before:
        if time.monotonic() > deadline:
            raise failed("; ".join(map(str, sorted(left))))
        time.sleep(_POLL)
    kinds: dict[str, int] = {}
    for trace in during:
        kinds[trace.kind] = kinds.get(trace.kind, 0) + 1
    return "gone: " + ", ".join(f"{kind}: {count}" for kind, count in sorted(kinds.items()))
