"""The worker that finds out why a container with GPUs ended, and reports it to users.

Rules
- The node agent's findings are in the container's file (:mod:`shim.causes.record`). The worker does
  not wait for the agent. Without an agent, it reads the kernel's log once, for lines between the
  container's start and end. A cause from that log is never certain.
- A line of that log concerns the container if it names its init process, or one of its GPUs or MIG
  devices. A process in the line that still lives is another container's; then only a fault of the
  device counts. A process that has ended cannot be attributed to a container any longer. So an
  application's fault counts as this container's only if it names its init, or within :data:`NEAR`
  seconds of the end; otherwise it is unclear.
- A certain failure of a device changes the exit code to the one set for the container or the node.
  A container that ran out of memory keeps its own code.
- A file that cannot be written is logged, and does not affect the rest.

A worker does this (:mod:`shim.work.worker`), because it may hang with a file system, and needs
modules that an idle shim should not load.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

from api.values import dataclass
from hooks.config import Config, load_config
from hooks.node import cache
from hooks.node.cache import StoredInventory
from hooks.requests.policy import read_container
from hooks.requests.prefilter import read_fault_exit_code
from hooks.sharing import held_by_nodes, held_by_record, id_of
from shim import bundle as bundle_files
from shim import files
from shim.causes import exit_store, kernel_log, message
from shim.causes.agent import agent_runs
from shim.causes.exit_message import exit_message, relevant
from shim.causes.record import KERNEL_LOG, Fault, Whose, read_causes
from shim.causes.xids import RECOVERY, Action, about, is_nonfatal, recovery_asked, with_recovery
from shim.errors import NvshimError
from shim.log import Log
from shim.processes import may_be_alive
from shim.work.claims import listed

NEAR: Final = 5.0
"""Seconds before the end in which an application's fault counts as the container's."""

# Seconds for reading the kernel's log, and by which its clock may differ.
_READING: Final = 0.6
_SLACK: Final = 1.0
# The log has the processor's times. On some machines they follow the first clock, which NTP
# corrects, and on others the second, which drifts by seconds a day.
_CLOCKS: Final = (time.CLOCK_MONOTONIC, time.CLOCK_MONOTONIC_RAW)
_LONGEST_RECORD: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class End:
    """How a container ended."""

    namespace: str  # containerd's
    container_id: str  # its id
    bundle: str  # its bundle
    pid: int  # its init process
    status: int  # init's exit status; not 0
    at: float  # when it ended, in seconds since the epoch
    out_of_memory: bool = False  # whether it ran out of memory


@dataclass(frozen=True, slots=True)
class Held:
    """A device that the container had."""

    uuid: str  # the GPU's or MIG device's, or the GPU's PCI address
    gpu: str  # the UUID of the GPU, or of the MIG device's GPU
    bus_id: str  # the GPU's PCI address without its function; "" if unknown
    instance: int | None = None  # the GPU instance of a MIG device; None for a GPU

    def is_of(self, line: kernel_log.LoggedXid) -> bool:
        """Whether a line of the kernel's log names this device."""
        if line.bus_id != self.bus_id:
            return False
        return None in (self.instance, line.gpu_instance) or self.instance == line.gpu_instance


def tell_cause(end: End, log: Log) -> dict[str, Any]:
    """Find out why a container ended; write it to its termination message and record.

    Args:
        end: how it ended.
        log: gets an entry for each failed read or write.

    Returns:
        ``cause``: a line to display, "" if no fault is known; ``status``: the exit status for
        containerd; ``first``: the most relevant fault, as JSON, or null.

    Raises:
        NvshimError: the configuration or the bundle cannot be read.
    """

    def warn(why: str) -> None:
        log.warning("the cause of an end is not told in full", id=end.container_id, why=why)

    config = load_config()
    spec = bundle_files.read_spec(end.bundle)
    held = _held(end.bundle, spec, cache.recall(config))
    faults = _faults(end, held, config, warn)
    if not faults:
        return {"cause": "", "status": end.status, "first": None}
    status = _status(end, faults[0], spec, config)
    original = None if status == end.status else end.status
    cause = exit_message(faults, end.at, os.uname().nodename, original)
    path, stays_empty = message.find_message_file(spec)
    try:
        if path:
            message.append(path, cause, unless_empty=stays_empty)
    except OSError as error:
        warn(f"{path}: {files.reason(error)}")
    container = {
        **exit_store.identity_of(end.namespace, end.container_id, spec),
        "gpus": [device.uuid for device in held],
        "ended": end.at,
        "exit_status": end.status,
        "told_status": status,
    }
    try:
        exit_store.write_ended(config.state, container, faults, cause)
    except NvshimError as error:
        warn(str(error))
    first = faults[0]
    return {
        "cause": cause,
        "status": status,
        "first": {
            "kind": first.kind, "code": first.code, "gpu": first.gpu, "whose": first.whose.value,
            "sure": first.sure, "source": first.source,
        },
    }  # fmt: skip


def _status(end: End, first: Fault, spec: Mapping[str, Any], config: Config) -> int:
    wish = read_fault_exit_code(spec)
    wanted = config.fault_exit_code if wish is None else wish
    is_device = first.whose == Whose.DEVICE and first.sure
    return wanted if wanted and is_device and not end.out_of_memory else end.status


def _faults(end: End, held: list[Held], config: Config, warn: Any) -> list[Fault]:
    """Return the faults that may have ended the container, most relevant first."""
    state = config.state
    start = _started(end.bundle)
    if start > end.at:  # the clock has been set back
        start = 0.0
    written = read_causes(state, end.namespace, end.container_id, warn=warn)
    known = relevant(written, end.at, start)
    if known or agent_runs(state):
        return known
    path = os.path.join(config.dev, "kmsg")
    found: list[Fault] = []
    try:
        now = time.time()
        offsets = [now - time.clock_gettime(clock) for clock in _CLOCKS]
        for line in kernel_log.read_xids(path, _READING):
            if not line.at:  # it has no time; 0 would be that of the boot
                continue
            moments = [offset + line.at for offset in offsets]
            at = next((x for x in moments if start - _SLACK <= x <= end.at + _SLACK), None)
            fault = None if at is None else _attributed(line, at, end, held)
            if fault is not None:
                found.append(fault)
    except OSError as error:  # no /dev/kmsg, no permission, or too much content
        if not isinstance(error, FileNotFoundError):
            warn(f"{path}: {error.strerror}")
    return relevant(found, end.at, start - _SLACK)


def _attributed(
    line: kernel_log.LoggedXid, at: float, end: End, held: Iterable[Held]
) -> Fault | None:
    """Return the meaning of a line for a container; None if it has none."""
    xid = about(line.xid)
    device = next((device for device in held if device.is_of(line)), None)
    is_own = bool(line.pid) and line.pid == end.pid
    if not xid.ends or (device is None and not is_own) or is_nonfatal(line.xid, line.text):
        return None
    whose, action = xid.whose, xid.action
    if line.xid == RECOVERY:
        asked = recovery_asked(line.text)
        if asked in {None, Action.NOTHING}:
            return None
        whose, action = with_recovery(xid, asked)
    if whose != Whose.DEVICE and not is_own:
        if may_be_alive(line.pid):
            return None
        if whose == Whose.APPLICATION and at < end.at - NEAR:
            whose = Whose.UNCLEAR
    return Fault(
        at=at,
        kind="xid",
        code=line.xid,
        name=xid.meaning,
        gpu=device.gpu if device else line.bus_id,
        mig=device.uuid if device and device.instance is not None else "",
        pid=line.pid,
        whose=whose,
        action=action,
        source=KERNEL_LOG,
    )


def _started(bundle: str) -> float:
    """Return when the runtime had created the container, in seconds since the epoch."""
    return os.stat(os.path.join(bundle, bundle_files.INIT_PID)).st_mtime


# -- the container and its devices -----------------------------------------------------------


def _held(bundle: str, spec: Mapping[str, Any], known: StoredInventory | None) -> list[Held]:
    """Return the container's NVIDIA devices, from its record or else from its nodes."""
    path = os.path.join(bundle, bundle_files.RECORD)
    record: dict[str, Any] = {}
    if os.path.lexists(path):
        record = files.parse_object(files.read(path, _LONGEST_RECORD), path)
    devices = held_by_record(record, known)
    if not devices and known is not None and not read_container(spec).privileged:
        devices = held_by_nodes(listed(spec), known)
    grant = record.get("grant") or {}
    addresses = {
        str(gpu.get("uuid") or gpu.get("bus_id")): str(gpu.get("bus_id"))
        for gpu in grant.get("gpus") or ()
    }
    instances: dict[str, int] = {}
    if known is not None:
        addresses = {id_of(gpu): gpu.bus_id for gpu in known.gpus} | addresses
        instances = {device.uuid: device.gpu_instance for device in known.mig_devices}
    return [
        Held(uuid, gpu, addresses.get(gpu, "").rpartition(".")[0], instances.get(uuid))
        for uuid, gpu in devices.items()
    ]
