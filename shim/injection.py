"""Where the shim asks the injection engine, and writes down what it said.

A container that asks for no GPU passes through here without a change: its config.json is not
even written again.
"""

from __future__ import annotations

import json
import os
import time

from hooks.requests.glance import find_places, lists_nodes, may_ask, may_want_more
from shim import bundle as bundle_files
from shim.errors import NvshimError, ProgramNotFound, ProgramTimeout
from shim.spawn import run

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Final

    from hooks.config import Config
    from hooks.engine import Injection, Prepared
    from hooks.node.inventory import Inventory
    from hooks.node.nodes import MadeNodes
    from hooks.requests.glance import Places
    from hooks.requests.policy import Verdict
    from shim.layers import Layer
    from shim.log import Log
    from shim.mounts import Mount
    from shim.reaper import Reaper


_FEATURES_TIMEOUT: Final = 10.0
_NO_VERSION: Final = "0.0.0"
_SOON: Final = 0.1  # seconds
_LONGEST_RECORD: Final = 1 << 24

# What of the record is asked for while the container lives: by Start, by execs, by a checkpoint.
_FOR_LATER: Final = ("identity", "proc_files", "process")


class _Asked:
    """What a container asks for and may have, and the node that it asks."""

    __slots__ = ("config", "inventory", "made", "verdict")

    def __init__(self, config: Config, verdict: Verdict) -> None:
        self.config = config
        self.verdict = verdict
        self.inventory: Inventory | None = None
        self.made: MadeNodes | None = None


# What look_ahead has seen, and when.
_ahead: tuple[float, Config, Inventory] | None = None


def look_ahead(bundle: str) -> None:
    """Look at the node's GPUs now, if the container of a bundle will ask for any.

    From a shim's start to its first Create, containerd takes some milliseconds, about as many as
    this does. What is seen is used once, and soon or not at all.

    Args:
        bundle: of the container for which the shim was started.
    """
    global _ahead  # noqa: PLW0603 - there is one first container
    try:
        spec = bundle_files.read_spec(bundle)
        if not may_ask(spec, find_places()):
            return
        from hooks import engine  # noqa: PLC0415 - see Injector._ask
        from hooks.config import load_config  # noqa: PLC0415

        config = load_config()
        if engine.read_request(spec, config).wants_injection:
            inventory = engine.load_inventory(config)
            if inventory is not None:
                _ahead = (time.monotonic(), config, inventory)
    except Exception:  # noqa: BLE001, S110 - Create does the same, and says what is wrong
        pass


def _seen_ahead(config: Config) -> Inventory | None:
    global _ahead
    seen, _ahead = _ahead, None
    if seen is None or seen[1] != config or time.monotonic() - seen[0] > _SOON:
        return None
    return seen[2]


class Injector:
    """What is injected into one container.

    Args:
        reaper: who waits for the child that asks NVML.
        bundle: the container's bundle.
        log: where it is said that NVML did not answer.
    """

    def __init__(self, reaper: Reaper, bundle: str, log: Log) -> None:
        self._reaper = reaper
        self._bundle = bundle
        self._log = log
        self._record: dict[str, Any] | None = None
        self._told_change = False
        self._asked: _Asked | None = None
        self._is_asked = False
        self._layer: Layer | None = None
        self._prepared: Prepared | None = None
        self._may_claim = False

    async def prepare(
        self, spec: dict[str, Any], rootfs_mounts: Sequence[Mount]
    ) -> Sequence[Mount] | None:
        """Find or make a layer of the image that has the files of what the container is given.

        Args:
            spec: the OCI spec as containerd wrote it.
            rootfs_mounts: what containerd wants mounted as its rootfs.

        Returns:
            What is to be mounted in their place; None if there is no such layer. Then
            :meth:`inject` writes the files into the container's own snapshot.

        Raises:
            NvshimError: the request cannot be met; the message says why.
        """
        self._asked, self._is_asked = await self._ask(spec), True
        asked = self._asked
        if asked is None or asked.inventory is None:
            return None
        from shim import layered  # noqa: PLC0415 - see _ask

        try:
            found = layered.prepare(
                self._bundle,
                spec,
                rootfs_mounts,
                request=asked.verdict.allowed,
                inventory=asked.inventory,
                config=asked.config,
            )
        except (NvshimError, OSError) as error:
            # If the container is the reason, it will be said without a layer as well.
            self._log.info("there is no layer for it", bundle=self._bundle, why=str(error))
            return None
        if found is None:
            return None
        mount, self._layer, self._prepared = found
        return (mount,)

    def forgo_layer(self) -> None:
        """Let go of the layer of :meth:`prepare`: nothing of it is mounted, or not any more."""
        if self._layer is not None:
            self._layer.close()
        self._layer = self._prepared = None

    def made(self, init: int) -> None:
        """The container has been made: what it claims is its init's.

        Args:
            init: the pid.

        Raises:
            BundleUnusable: that cannot be written down.
        """
        if not self._may_claim:
            return
        claim, _, _ = bundle_files.read_claim(self._bundle)
        if claim:
            from shim import remains  # noqa: PLC0415 - few nodes have limits

            start_time = remains.start_time_of(init)
            bundle_files.write_claim(self._bundle, claim, init, start_time)

    def release(self) -> None:
        """The container is gone: let go of its layer, and of what was staged for it.

        The delete verb, for which containerd and a user wait, then has nothing to look after.
        """
        self.forgo_layer()
        if self._may_claim:
            try:
                bundle_files.release_claim(self._bundle)
            except (NvshimError, OSError) as error:  # it is dead when the bundle is gone
                self._log.warning("a claim is left", bundle=self._bundle, why=str(error))
        if self._record is not None:
            try:
                bundle_files.remove_staging(self._bundle)
            except OSError as error:  # containerd removes the whole bundle
                self._log.warning("staged files are left", bundle=self._bundle, why=str(error))

    async def inject(self, spec: dict[str, Any], rootfs: str, runtime: str = "runc") -> None:
        """Give the container what it asks for and may have.

        Writes the changed spec to the bundle, and files into the rootfs and the bundle's
        staging directory. Nothing is written if nothing is asked for, or if it cannot be given;
        after any other failure :meth:`undo` takes back what is in the bundle.

        Args:
            spec: the OCI spec as containerd wrote it.
            rootfs: the mounted root of the container.
            runtime: the low-level runtime that is to make it.

        Raises:
            NvshimError: the request cannot be met; the message says why.
        """
        asked = self._asked if self._is_asked else await self._ask(spec)
        if asked is None:
            return
        injection = await self._decided(spec, rootfs, runtime, asked)
        if not asked.verdict.allowed.wants_injection:
            # The spec stays as it is, and later execs have nothing to get.
            self._keep(injection.record)
            return
        bundle_files.keep_spec(self._bundle)
        self._keep(injection.record)
        bundle_files.write_spec(self._bundle, injection.spec)
        # Neither an inventory nor a plan is for a process that idles.
        self._record = {name: injection.record[name] for name in _FOR_LATER}
        self._asked = self._prepared = None

    async def _ask(self, spec: dict[str, Any]) -> _Asked | None:
        """What is asked and may be had, and the node; None if nothing is asked."""
        places = find_places()
        asked = await self._ask_there(spec, places)
        if places.limited and not self._may_claim and lists_nodes(spec):
            await self._claim_listed(spec)
        return asked

    async def _ask_there(self, spec: dict[str, Any], places: Places) -> _Asked | None:
        if not may_ask(spec, places):
            if places.failure:
                self._log.warning("the configuration may name more places", why=places.failure)
            return await self._ask_more(spec) if may_want_more(spec) else None
        # Everything below costs a container without GPU nothing, not even an import.
        from hooks import engine  # noqa: PLC0415
        from hooks.config import load_config  # noqa: PLC0415

        config = load_config()
        request = engine.read_request(spec, config)
        if not request.wants_injection:
            return None
        verdict = engine.judge(spec, request, config)
        for denied in verdict.denials:
            container = os.path.basename(self._bundle)
            self._log.warning("it does not get what it asks for", container=container, why=denied)
        asked = _Asked(config, verdict)
        needed = engine.needs_inventory(verdict.allowed, config)
        inventory = _seen_ahead(config)
        for command in engine.module_commands(config, verdict.allowed):
            inventory = None  # a module that is loaded now has changed the node since
            if not await self._load_module(command):
                break
        if needed:
            inventory = inventory or engine.load_inventory(config)
            if inventory is None:
                inventory = await self._take_inventory(config)
            asked.inventory, asked.made = engine.make_nodes(verdict.allowed, inventory, config)
            if config.holders != "any" or config.holders_of:
                await self._claim(spec, asked)
        return asked

    async def _ask_more(self, spec: dict[str, Any]) -> _Asked | None:
        """What is asked beside the devices that somebody else has given by the spec."""
        from hooks import engine  # noqa: PLC0415 - see _ask
        from hooks.config import load_config  # noqa: PLC0415 - likewise

        try:
            config = load_config()
            inventory = engine.load_inventory(config) or await self._take_inventory(config)
            request = engine.more_of_listed(spec, inventory)
            if request is None:
                return None
            asked = _Asked(config, engine.judge(spec, request, config))
            asked.inventory, asked.made = engine.make_nodes(request, inventory, config)
        except NvshimError as error:  # what it has been given it keeps
            container = os.path.basename(self._bundle)
            self._log.warning("it gets what its spec has", container=container, why=str(error))
            return None
        return asked

    async def _claim_listed(self, spec: dict[str, Any]) -> None:
        """Have what the spec lists already, where only so many may, and somebody else gives it."""
        from hooks import engine  # noqa: PLC0415 - see _ask
        from hooks.config import load_config  # noqa: PLC0415 - likewise
        from hooks.requests.policy_errors import DeviceHeld  # noqa: PLC0415 - see _claim
        from hooks.requests.sharing import is_limited  # noqa: PLC0415 - likewise

        config = load_config()
        if not is_limited(config):
            return
        from shim import claims  # noqa: PLC0415 - likewise

        container = os.path.basename(self._bundle)
        try:
            inventory = engine.load_inventory(config) or await self._take_inventory(config)
        except NvshimError as error:  # without a driver nobody has anything
            self._log.warning("its GPUs are not counted", container=container, why=str(error))
            return
        self._may_claim = True
        try:
            await claims.claim_listed(self._bundle, spec, inventory, config)
        except DeviceHeld as error:
            if config.holders_beyond == "fail":
                raise
            # They are not ours to take away; it counts by its nodes.
            self._log.warning("it has what others have", container=container, why=str(error))

    async def _claim(self, spec: dict[str, Any], asked: _Asked) -> None:
        """Have what the container is to get, where only so many may."""
        from hooks import engine  # noqa: PLC0415 - see _ask
        from hooks.requests.policy_errors import DeviceHeld  # noqa: PLC0415 - most nodes have no
        from hooks.requests.sharing import without_gpus  # noqa: PLC0415 - limit, and load none
        from shim import claims  # noqa: PLC0415 - of it

        config = asked.config
        self._may_claim = True
        while asked.inventory is not None:
            inventory, allowed = asked.inventory, asked.verdict.allowed
            try:
                await claims.claim(self._bundle, spec, allowed, inventory, config)
            except engine.FOUNDED_ON_INVENTORY:
                if not inventory.kept or inventory.nvml_failure:
                    raise
                inventory = await self._take_inventory(config)
                asked.inventory, asked.made = engine.make_nodes(allowed, inventory, config)
            except DeviceHeld as error:
                if config.holders_beyond == "fail":
                    raise
                container = os.path.basename(self._bundle)
                self._log.warning("it starts without GPUs", container=container, why=str(error))
                asked.verdict = without_gpus(asked.verdict, str(error))
                asked.inventory = asked.made = None
                bundle_files.release_claim(self._bundle)  # of an earlier inventory
            else:
                return

    async def _decided(
        self, spec: dict[str, Any], rootfs: str, runtime: str, asked: _Asked
    ) -> Injection:
        """What is injected, by as much as has to be known for it; most need one try."""
        from hooks import engine  # noqa: PLC0415 - see _ask

        inventory, made, version = asked.inventory, asked.made, ""
        staging = os.path.join(self._bundle, bundle_files.STAGING)
        while True:
            try:
                return engine.inject(
                    spec,
                    asked.verdict.allowed,
                    inventory,
                    rootfs=rootfs,
                    staging=staging,
                    config=asked.config,
                    oci_version=version,
                    verdict=asked.verdict,
                    prepared=self._prepared,
                    made_nodes=made,
                )
            except engine.RuntimeUnasked:
                if version:
                    raise
                version = await self._newest_oci_version(runtime)
            except engine.FOUNDED_ON_INVENTORY:
                # The kernel does not tell of everything: nothing is refused for what was so
                # earlier.
                if inventory is None or not inventory.kept or inventory.nvml_failure:
                    raise
                if self._layer is not None:
                    raise  # what is mounted was decided by this inventory
                inventory, made = await self._take_inventory(asked.config), None
                if self._may_claim:
                    asked.inventory = inventory
                    await self._claim(spec, asked)
                    inventory = asked.inventory

    def _keep(self, record: dict[str, Any]) -> None:
        path = os.path.join(self._bundle, bundle_files.RECORD)
        bundle_files.write(path, json.dumps(record).encode())

    async def cover_proc(self, pid: int) -> None:
        """Cover the files of procfs that the container is not to see as they are.

        What came of it is written into the record; what could not be covered is no error.

        Args:
            pid: the container's init, which has not been reaped.

        Raises:
            BundleUnusable: the record cannot be written.
        """
        files = self._proc_files()
        if files:
            from shim.proc_cover import cover  # noqa: PLC0415 - see _ask

            sources = {file["path"]: file["source"] for file in files}
            self._note(files, await cover(pid, sources))

    async def uncover_proc(self, pid: int) -> None:
        """Take away what :meth:`cover_proc` has mounted, for CRIU, which would refuse it.

        Args:
            pid: the container's init, which has not been reaped.
        """
        from shim import proc_cover  # noqa: PLC0415 - see _ask

        files = [file for file in self._proc_files() if file["state"] == proc_cover.COVERED]
        paths = [file["path"] for file in files]
        self._note(files, await proc_cover.uncover(pid, paths))

    def _proc_files(self) -> list[dict[str, str]]:
        return [] if self._record is None else self._record["proc_files"]

    def _note(self, files: list[dict[str, str]], states: dict[str, str]) -> None:
        if not files:
            return
        path = os.path.join(self._bundle, bundle_files.RECORD)
        record = bundle_files.read(path, _LONGEST_RECORD)
        for file in files:
            before = json.dumps(file).encode()
            file["state"] = states[file["path"]]
            # As it was written, and nothing else of some fifty thousand bytes has to be.
            record = record.replace(before, json.dumps(file).encode(), 1)
        bundle_files.write(path, record)

    def undo(self) -> None:
        """Take back what :meth:`inject` wrote to the bundle: the container was not made.

        Raises:
            NvshimError: config.json could not be put back.
            OSError: a file of ours could not be removed.
        """
        # First what gives room back: a full disk may be why we are here.
        bundle_files.remove(os.path.join(self._bundle, bundle_files.RECORD))
        if self._may_claim:
            bundle_files.release_claim(self._bundle)
        bundle_files.remove_staging(self._bundle)
        bundle_files.restore_spec(self._bundle)

    def refuse_changed(self, name: str) -> None:
        """Refuse to start the container if the driver has changed since it was created.

        Args:
            name: its id.

        Raises:
            NvshimError: it has; the message says what of it.
        """
        if self._record is not None:
            from hooks.node.identity import refuse_changed  # noqa: PLC0415 - see _ask

            refuse_changed(self._record, name)

    def edit_process(self, process: dict[str, Any]) -> dict[str, Any]:
        """The spec of an exec, with the environment and groups that init was given.

        Args:
            process: the OCI process as containerd sent it. CRI makes it from a spec that
                predates the injection.
        """
        if self._record is None:
            return process
        from hooks import engine  # noqa: PLC0415 - see _ask
        from hooks.node.identity import what_changed  # noqa: PLC0415 - see _ask

        # An exec is how people find out what is wrong in there.
        changed = "" if self._told_change else what_changed(self._record)
        if changed:
            self._told_change = True
            self._log.warning("the driver of a running container has changed", why=changed)
        return engine.apply_to_process(process, self._record)

    async def _newest_oci_version(self, runtime: str) -> str:
        """The newest OCI specification that the low-level runtime says it knows; or none."""
        try:
            done = await run(self._reaper, [runtime, "features"], timeout=_FEATURES_TIMEOUT)
            version = json.loads(done.output)["ociVersionMax"]
        except (ProgramTimeout, ProgramNotFound, ValueError, TypeError, KeyError) as error:
            self._log.warning("the runtime does not tell its features", why=str(error))
            return _NO_VERSION
        return str(version)

    async def _load_module(self, command: Sequence[str]) -> bool:
        """Load one, or say why not; whether it makes sense to try the next."""
        from hooks.node.modules import DRIVER, TIMEOUT  # noqa: PLC0415 - see _ask

        name = command[-1]
        try:
            done = await run(self._reaper, command, timeout=TIMEOUT)
        except (ProgramNotFound, ProgramTimeout) as error:
            self._log.warning("a kernel module is not loaded", module=name, why=str(error))
            return False
        if done.exit.status:
            why = f"{command[0]} ended with status {done.exit.status}"
            self._log.warning("a kernel module is not loaded", module=name, why=why)
            return name != DRIVER  # without which no other can be
        self._log.info("a kernel module was loaded", module=name)
        return True

    async def _take_inventory(self, config: Config) -> Inventory:
        from hooks import engine  # noqa: PLC0415 - see _ask

        report: bytes | None = None
        try:
            done = await run(
                self._reaper, engine.probe_command(config), timeout=config.nvml_timeout
            )
            report = done.output
        except ProgramTimeout as error:
            # A hung driver must not hold the container up: procfs knows the whole GPUs.
            self._log.warning("NVML did not answer", why=str(error))
        inventory = engine.take_inventory(config, report)
        if report is not None and inventory.nvml_failure:
            self._log.warning("NVML is of no use", why=inventory.nvml_failure)
        for note in inventory.notes:
            if note.startswith(engine.NOT_KEPT):
                # Nothing fails, but NVML holds up each container from now on.
                self._log.warning("every container looks at the node anew", why=note)
        return inventory
