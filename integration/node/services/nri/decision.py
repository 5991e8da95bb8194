"""Decide which GPUs a container gets through NRI: those that the kubelet recorded for it.

::

    message ──▶ spec ──▶ the kubelet's record ──▶ request, policy ──▶ engine ──▶ answer, record

Rules
- The policy is the engine's mode ``strict``, whatever mode is configured for the shim: NRI shows
  all containers of the node, but neither which ones are privileged nor who wrote a variable. So no
  namespace and no mount is trusted.
- A container without a grant gets nothing; this costs one look into the kubelet's files. If these
  files exist but cannot be understood, a container that requests a GPU is refused.
- A container that has a grant but requests nothing gets its grant, as with a CDI name that its
  engine does not read. If its variable says ``void``, it gets nothing.
- A container that already has devices and driver files, through CDI, is not changed.
- Only NVIDIA's devices are injected. Others are named by CDI, which is the runtime's task.
- The inventory is the agent's. The driver is not asked, because a driver that hangs would block the
  whole node.
- Only the shims' leases enforce the limits of [sharing]. So with such a limit a container is
  refused. It is also refused in a user namespace, if a device's node would merely be mounted.
- A container is refused if it has a variable twice to which the agent must add (LD_LIBRARY_PATH):
  an engine replaces the first one, and then sets the last one unchanged.

Source: github.com/containerd/nri pkg/runtime-tools/generate, AdjustEnv.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from api.proto import nri_pb2 as pb
from api.values import dataclass, replace
from hooks import engine
from hooks.config import Config, Mode
from hooks.node.inventory import Inventory
from hooks.node.kubelet import read_kubelet_record
from hooks.ocispec import Json, variables_of
from hooks.requests import policy
from hooks.requests.kubelet_record import KubeletRecord
from hooks.requests.places import DEVICES
from hooks.requests.prefilter import lists_nodes
from hooks.requests.request import Request
from hooks.service import refuse_driver, refuse_held
from hooks.sharing import is_limited
from integration.agent_errors import NriUndecided, NriUnlimited, NriUnmapped, NriVariableLost
from integration.node.services.nri import records
from integration.node.services.nri.messages import adjustment_of, spec_of

_LIBCUDA: Final = "/libcuda.so."
_NOT_COVERED: Final = "not covered: NRI cannot"


@dataclass(frozen=True, slots=True)
class Decision:
    """What a container gets."""

    adjustment: pb.ContainerAdjustment | None = None  # None for nothing
    devices: tuple[str, ...] = ()  # UUIDs, for display
    denied: str = ""  # what it asked for beyond its grant, for display


NOTHING: Final = Decision()


def decide(
    pod: pb.PodSandbox, container: pb.Container, config: Config, inventory: Inventory | None
) -> Decision:
    """Decide what a container gets, and keep its record and the files that are mounted.

    Args:
        inventory: the node's devices as the agent knows them; None if it does not.

    Raises:
        NvshimError: the kubelet gave it a GPU that it cannot have, or may have given it one.
        OSError: the record cannot be written.
    """
    config = replace(
        config,
        mode=Mode.STRICT,
        trusted_namespaces=(),
        accept_mounts="auto" if config.accept_mounts is True else config.accept_mounts,
    )
    spec = spec_of(pod, container)
    if _has_all(spec):
        return NOTHING
    whose = policy.read_container(spec)
    record = read_kubelet_record(whose, config)
    if record.doubt and not record.gave_anything:
        _refuse_doubt(spec, config, record, container.name)
    if not record.gave_anything:
        return NOTHING
    request = _request(spec, config, record)
    if not request.wants_driver:
        return NOTHING
    verdict = policy.judge(request, whose, config, record)
    denied = "; ".join(verdict.denials)
    if not verdict.allowed.wants_driver:
        return Decision(denied=denied)
    injection = _inject(spec, container, config, verdict, inventory)
    grant: dict[str, Any] = injection.record["grant"] or {}
    devices = (*grant.get("gpus", ()), *grant.get("mig_devices", ()))
    return Decision(
        adjustment_of(spec, injection.spec), tuple(each["uuid"] for each in devices), denied
    )


def _inject(
    spec: Json,
    container: pb.Container,
    config: Config,
    verdict: policy.Verdict,
    inventory: Inventory | None,
) -> engine.Injection:
    """Edit the spec as the verdict allows, and keep the record; a failure leaves nothing."""
    asked, allowed = f"the GPUs of container {container.name}", verdict.allowed
    if is_limited(config):
        raise NriUnlimited(asked, found="[sharing] limits how many containers have a GPU")
    refuse_driver(config, allowed.source)
    if inventory is not None:
        inventory = engine.make_nodes(allowed, inventory, config)
    elif engine.needs_inventory(allowed, config):
        raise NriUndecided(asked, found="the agent does not know the node's GPUs yet")
    directory = records.directory_of(config.state, container.id)
    target = engine.UnseenTarget(directory)
    try:
        injection = engine.inject(spec, allowed, inventory, target, config=config, verdict=verdict)
        _refuse_shut(injection.spec["linux"], asked)
        _refuse_lost(spec["process"]["env"], injection.spec["process"]["env"], asked)
        if inventory is not None:
            known = inventory
            refuse_held(injection.record, (), config, lambda: known)
        for file in injection.record["proc_files"]:
            file["state"] = _NOT_COVERED
        records.write(directory, injection.record)
    except BaseException:
        records.remove(config.state, container.id)
        raise
    return injection


def _refuse_doubt(spec: Json, config: Config, record: KubeletRecord, name: str) -> None:
    """Refuse a container that requests a GPU, since the kubelet may have given it one."""
    if engine.read_request(spec, config).wants_driver:
        raise NriUndecided(f"the GPUs of container {name}", found=record.doubt)


def _refuse_shut(linux: Json, asked: str) -> None:
    """Refuse a container with a device that no node of the spec would allow it to open."""
    nodes = {(node["type"], node["major"], node["minor"]) for node in linux["devices"]}
    for rule in linux.get("resources", {}).get("devices", ()):
        if (rule["type"], rule["major"], rule["minor"]) not in nodes:
            number = f"{rule['major']}:{rule['minor']}"
            raise NriUnmapped(asked, found=f"device {number}, which is mounted only")


def _refuse_lost(before: list[str], after: list[str], asked: str) -> None:
    """Refuse a container with a variable that the engine would set back to its old value."""
    there = Counter(_names(entry for entry in before if "=" in entry))
    for name in _names(after[len(before) :]):
        if there[name] > 1:
            raise NriVariableLost(asked, found=f"the container has {name} twice")


def _names(environment: Iterable[str]) -> list[str]:
    return [entry.partition("=")[0] for entry in environment]


def _has_all(spec: Json) -> bool:
    """Whether a container has NVIDIA's devices and driver already."""
    destinations = (mount["destination"] for mount in spec["mounts"])
    return lists_nodes(spec) and any(_LIBCUDA in each for each in destinations)


def _request(spec: Json, config: Config, record: KubeletRecord) -> Request:
    """Return its request for NVIDIA's devices: of its spec or, if that has none, its grant."""
    request = engine.read_request(spec, config)
    if not request.wants_driver and DEVICES not in variables_of(spec):
        given = "all" if record.every else ",".join(map(str, record.devices))
        process = {"env": [*spec["process"]["env"], f"{DEVICES}={given or 'void'}"]}
        request = engine.read_request({**spec, "process": process}, config)
    return replace(request, cdi_devices=(), amd_devices="", intel_devices="")
