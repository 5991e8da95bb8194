"""The worker's task for a container that requests GPUs: turn its bundle into a rootfs with files.

It calls the engine, mounts the rootfs, writes files into it, and writes the changed spec and the
record to the bundle. Only the worker runs this.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from api.values import dataclass, replace
from hooks import engine
from hooks.config import Config, load_config
from hooks.engine import Injection, Inventory, Prepared
from hooks.errors import DeviceHeld
from hooks.node.host_setup import DRIVER
from hooks.node.host_setup import TIMEOUT as MODULE_TIMEOUT
from hooks.requests.policy import Verdict, read_container
from hooks.requests.prefilter import Prefilter
from hooks.requests.request import Request
from hooks.service import refuse_driver, refuse_held
from hooks.sharing import is_limited, without_gpus
from hooks.targets import Target
from shim import bundle as bundle_files
from shim import files
from shim.bundle import root_of
from shim.errors import MountFailed, NvshimError, ProgramNotFound, ProgramTimeout
from shim.log import Log
from shim.rootfs import mounts, proc_cover
from shim.rootfs.mounts import Mount
from shim.work import claims, layered
from shim.work.layers import Layer
from shim.work.listed import shut_nodes
from shim.work.worker import Answer, Link

_NO_FEATURES: Final = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
_FEATURES_TIMEOUT: Final = 10.0
_NO_VERSION: Final = "0.0.0"
_WITH_NET_DEVICES: Final = "1.3.0"
_SOON: Final = 0.1  # seconds

# Parts of the record that a running container needs: for Start, execs, checkpoints.
_FOR_LATER: Final = ("identity", "proc_files", "process")


@dataclass(frozen=True, slots=True)
class _Case:
    """A container's allowed request, and the node at the time of the decision."""

    config: Config
    verdict: Verdict
    inventory: Inventory | None = None


class Provision:
    """The work for one container.

    Args:
        bundle: the container's bundle.
        log: the shim's log.
        link: the connection to the shim.
    """

    def __init__(self, bundle: str, log: Log, link: Link) -> None:
        self._bundle = bundle
        self._log = log
        self._link = link
        self._container = os.path.basename(bundle)
        self._claimed = False
        self._saved: bool | None = None
        self._ahead: tuple[float, Config, Inventory] | None = None

    def look_ahead(self) -> None:
        """Load the inventory before Create; it is used soon or not at all."""
        try:
            config = load_config()
            inventory = engine.load_inventory(config)
            if inventory is not None:
                self._ahead = (time.monotonic(), config, inventory)
        except Exception:  # noqa: BLE001, S110 - provide does the same, and raises it
            pass

    def provide(
        self,
        found: Prefilter,
        rootfs_mounts: Sequence[Mount],
        runtime: str,
        saved: bool | None = None,  # noqa: FBT001 - see Args
    ) -> Answer:
        """Mount the rootfs, and grant the container's allowed request.

        Nothing is written without a request, or if it cannot be met. After any other failure, the
        shim undoes all changes.

        Args:
            found: the prefilter's result for the container's spec.
            rootfs_mounts: containerd's mounts for the rootfs.
            runtime: the low-level runtime.
            saved: for a restored container, whether the driver's files were in a layer when it was
                saved; None for others.

        Returns:
            ``mounted``: the mounts; ``claimed``: whether the bundle has a claim; ``later``: the
                part of the record for :mod:`shim.work.injection`, or null; ``nodes``: those to
                cover in a user namespace. The descriptor holds the mounted layer.

        Raises:
            NvshimError: the request cannot be met, or the rootfs cannot be mounted.
        """
        spec = bundle_files.read_spec(self._bundle)
        case = self._decide(spec, found)
        self._saved = saved
        mounted, layer, target = self._mount(spec, case, rootfs_mounts)
        later, record = None, {}
        nodes = list(shut_nodes(spec, ()))
        if case is not None and target is not None:
            injection = self._inject(spec, case, runtime, target)
            record = injection.record
            if case.verdict.allowed.wants_injection:
                bundle_files.keep_spec(self._bundle)
                ours: list[dict[str, Any]] = injection.record["owned_nodes"]
                # True by the time of the start; the shim reports files that it cannot cover.
                for file in (*injection.record["proc_files"], *ours):
                    file["state"] = proc_cover.COVERED
                ours += shut_nodes(spec, {node["path"] for node in ours})
                nodes = ours
                self._write_record(injection)
                bundle_files.write_spec(self._bundle, injection.spec)
                later = {name: injection.record[name] for name in _FOR_LATER}
                later["driver_layer"] = bool(injection.record["driver_layer"])
            else:
                # The spec does not change, and later execs get nothing.
                self._write_record(injection)
        self._refuse_drained(spec, case, record)
        value = {"mounted": mounted, "claimed": self._claimed, "later": later, "nodes": nodes}
        return value, -1 if layer is None else layer.fd

    # -- allowed request -----------------------------------------------------------------------

    def _decide(self, spec: dict[str, Any], found: Prefilter) -> _Case | None:
        """Return the container's allowed request; None if it requests nothing."""
        case = self._asked(spec) if found.requests else None
        # An NVIDIA hook that an engine has added requests no device.
        asks = case is not None and case.verdict.asked.wants_devices
        if found.wants_more and not asks:
            case = self._more_than_listed(spec) or case
        if found.counts_nodes and not self._claimed:
            self._claim_listed(spec)
        return case

    def _asked(self, spec: dict[str, Any]) -> _Case | None:
        config = load_config()
        request = engine.read_request(spec, config)
        if not request.wants_injection:
            return None
        verdict = engine.judge(spec, request, config)
        for why in verdict.denials:
            self._warn("it does not get what it asks for", why)
        # Loading a module has changed the node.
        seen = None if self._load_modules(config, verdict.allowed) else self._seen_ahead(config)
        case = _Case(config, verdict)
        if not engine.needs_inventory(verdict.allowed, config):
            if engine.has_applied(spec, verdict.allowed, config):
                return replace(case, inventory=seen or self._inventory_of_applied(config))
            return case

        def claim(inventory: Inventory) -> None:
            if config.holders != "any" or config.holders_of:
                self._claimed = True
                claims.claim(self._bundle, spec, verdict.allowed, inventory, config)

        try:
            inventory = engine.look_at_node(
                verdict.allowed,
                config,
                ask_nvml=lambda: self._take_inventory(config),
                claim=claim,
                seen=seen,
            )
        except DeviceHeld as error:
            if config.holders_beyond == "fail":
                raise
            self._warn("it starts without GPUs", str(error))
            bundle_files.release_claim(self._bundle)  # from an earlier inventory
            return replace(case, verdict=without_gpus(verdict, str(error)))
        return replace(case, inventory=inventory)

    def _inventory_of_applied(self, config: Config) -> Inventory | None:
        """Return the inventory for a container that would work without one, but more slowly."""
        try:
            return engine.load_inventory(config) or self._take_inventory(config)
        except NvshimError as error:
            self._log.info("there is no layer for it", bundle=self._bundle, why=str(error))
            return None

    def _more_than_listed(self, spec: dict[str, Any]) -> _Case | None:
        """Return the allowed request beyond the devices that the spec already lists."""
        try:
            config = load_config()
            inventory = engine.load_inventory(config) or self._take_inventory(config)
            request = engine.more_of_listed(spec, inventory)
            if request is None:
                return None
            verdict = engine.judge(spec, request, config)
            inventory = engine.make_nodes(request, inventory, config)
        except NvshimError as error:  # the container keeps its spec's devices
            self._warn("it gets what its spec has", str(error))
            return None
        return _Case(config, verdict, inventory)

    def _claim_listed(self, spec: dict[str, Any]) -> None:
        """Claim the devices that the spec already lists, if they have a limit of holders."""
        config = load_config()
        if not is_limited(config):
            return
        try:
            inventory = engine.load_inventory(config) or self._take_inventory(config)
        except NvshimError as error:  # without a driver no container has a device
            self._warn("its GPUs are not counted", str(error))
            return
        self._claimed = True
        try:
            claims.claim(self._bundle, spec, None, inventory, config)
        except DeviceHeld as error:
            if config.holders_beyond == "fail":
                raise
            # We cannot remove them. The container counts by its nodes.
            self._warn("it has what others have", str(error))

    def _refuse_drained(
        self, spec: dict[str, Any], case: _Case | None, record: Mapping[str, Any]
    ) -> None:
        """Refuse devices taken out of service; by now the bundle shows what it would hold."""
        config = load_config() if case is None else case.config

        def find_inventory() -> Inventory:
            known = None if case is None else case.inventory
            return known or engine.load_inventory(config) or self._take_inventory(config)

        # A privileged container lists every node of the host, which means nothing.
        listed = () if read_container(spec).privileged else claims.listed(spec)
        refuse_held(record, listed, config, find_inventory)

    def _seen_ahead(self, config: Config) -> Inventory | None:
        seen = self._ahead
        if seen is None or seen[1] != config or time.monotonic() - seen[0] > _SOON:
            return None
        return seen[2]

    # -- the rootfs ----------------------------------------------------------------------------

    def _mount(
        self, spec: dict[str, Any], case: _Case | None, wanted: Sequence[Mount]
    ) -> tuple[Sequence[Mount], Layer | None, Target | None]:
        """Mount the rootfs, if possible with a layer that contains the container's files.

        Returns:
            The mounts, the layer among them, and the target for the container's files; None if no
            engine runs.
        """
        rootfs = os.path.join(self._bundle, bundle_files.ROOTFS)
        staging = os.path.join(self._bundle, bundle_files.STAGING)
        found = self._find_layer(spec, case, wanted)
        if found is not None:
            mount, layer, prepared = found
            try:
                mounts.mount_rootfs([mount], rootfs)
            except MountFailed as error:
                self._warn("mounted without a layer", str(error))
                layer.close()
            else:
                return (
                    [mount],
                    layer,
                    engine.LayerTarget(prepared, root_of(spec, self._bundle), staging),
                )
        mounts.mount_rootfs(wanted, rootfs)
        if case is None:
            return wanted, None, None
        return wanted, None, engine.RootfsTarget(root_of(spec, self._bundle), staging)

    def _find_layer(
        self, spec: dict[str, Any], case: _Case | None, wanted: Sequence[Mount]
    ) -> tuple[Mount, Layer, Prepared] | None:
        if case is None or case.inventory is None:
            return None
        config = case.config
        if self._saved is not None:
            config = replace(config, driver_layer=self._saved)
        try:
            return layered.prepare(
                self._bundle,
                spec,
                wanted,
                request=case.verdict.allowed,
                inventory=case.inventory,
                config=config,
                log=self._log,
                restored=bool(self._saved),
            )
        except (NvshimError, OSError) as error:
            # If the container is the reason, an injection without a layer raises the same.
            self._log.info("there is no layer for it", bundle=self._bundle, why=str(error))
            return None

    def _inject(self, spec: dict[str, Any], case: _Case, runtime: str, target: Target) -> Injection:
        return engine.inject(
            spec,
            case.verdict.allowed,
            case.inventory,
            target,
            config=case.config,
            oci_version=lambda: self._newest_oci_version(runtime),
            verdict=case.verdict,
        )

    def _write_record(self, injection: Injection) -> None:
        path = os.path.join(self._bundle, bundle_files.RECORD)
        files.write(path, json.dumps(injection.record).encode())

    # -- programs ------------------------------------------------------------------------------

    def _newest_oci_version(self, runtime: str) -> str:
        """Return the newest OCI specification version that the low-level runtime reports."""
        try:
            _, output = self._link.run([runtime, "features"], _FEATURES_TIMEOUT)
            return newest_oci_version(output)
        except (ProgramTimeout, ProgramNotFound, *_NO_FEATURES) as error:
            self._log.warning("the runtime does not tell its features", why=str(error))
            return _NO_VERSION

    def _load_modules(self, config: Config, request: Request) -> bool:
        """Load the kernel modules that a request needs; return whether any was missing."""
        commands = engine.module_commands(config, request)
        if commands:
            refuse_driver(config, request.source)
        for command in commands:
            if not self._load_module(command):
                break
        return bool(commands)

    def _load_module(self, command: Sequence[str]) -> bool:
        """Load a module, or log why not; return whether to try the next."""
        name = command[-1]
        try:
            status, _ = self._link.run(command, MODULE_TIMEOUT)
        except (ProgramNotFound, ProgramTimeout) as error:
            self._log.warning("a kernel module is not loaded", module=name, why=str(error))
            return False
        if status:
            why = f"{command[0]} ended with status {status}"
            self._log.warning("a kernel module is not loaded", module=name, why=why)
            return name != DRIVER  # all others need it
        self._log.info("a kernel module was loaded", module=name)
        return True

    def _take_inventory(self, config: Config) -> Inventory:
        refuse_driver(config)
        report: bytes | None = None
        try:
            _, report = self._link.run(engine.probe_command(config), config.nvml_timeout)
        except (ProgramTimeout, ProgramNotFound) as error:
            # Neither a hung driver nor an interpreter that was removed together with the shim's
            # tree may delay the container: procfs has the whole GPUs.
            self._log.warning("NVML did not answer", why=str(error))
        inventory = engine.take_inventory(config, report)
        if report is not None and inventory.nvml_failure:
            self._log.warning("NVML cannot be used", why=inventory.nvml_failure)
        for note in inventory.notes:
            if note.startswith(engine.NOT_KEPT):
                # This is no failure, but NVML will delay each container.
                self._log.warning("every container has to ask NVML", why=note)
        return inventory

    def _warn(self, event: str, why: str) -> None:
        self._log.warning(event, container=self._container, why=why)


def newest_oci_version(output: bytes) -> str:
    """Return the newest OCI specification version that a runtime supports, by its features.

    crun reports version 1.1.0, and linux.netDevices of version 1.3.0 as a feature.

    Args:
        output: of ``runc features`` or ``crun features``.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, RecursionError: it is malformed.
    """
    features = json.loads(output)
    moves_interfaces = (features.get("linux") or {}).get("netDevices") or {}
    if moves_interfaces.get("enabled") is True:
        return _WITH_NET_DEVICES
    return str(features["ociVersionMax"])
