"""The shim's side of the injection: a worker does it, and the shim keeps the few needed values.

A container without a GPU request skips this (:mod:`shim.pod.creation`): no worker is forked, and
its config.json is not rewritten.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, Final

from api.values import dataclass
from hooks.requests.prefilter import Prefilter, prefilter
from shim import bundle as bundle_files
from shim import files, loop
from shim.children import Reaper
from shim.errors import NvshimError, WorkerFailed
from shim.log import Log
from shim.processes import start_time_of
from shim.rootfs import node_cover, proc_cover
from shim.rootfs.mounts import Mount
from shim.work.worker import Answer, Link, Worker

_LONGEST_RECORD: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Results for a container before its Create."""

    spec: dict[str, Any]
    found: Prefilter
    worker: Worker | None  # None if it requests nothing


# Results for the shim's first container, by its bundle.
_ahead: dict[str, _Ahead] = {}


def look_ahead(bundle: str, reaper: Reaper, log: Log) -> None:
    """Prefilter a bundle's container, and start its worker if it requests GPUs.

    containerd takes some milliseconds between the start of a shim and its first Create. Meanwhile,
    the worker loads the inventory.

    Args:
        bundle: the bundle of the shim's first container.
        reaper: collects the worker.
        log: the shim's log.
    """
    try:
        spec = bundle_files.read_spec(bundle)
        found = prefilter(spec)
        worker = _fork(bundle, found, reaper, log, ahead=True) if found.requests else None
        _ahead[bundle] = _Ahead(spec, found, worker)
    except (NvshimError, OSError):
        pass  # Create repeats this, and reports the error


def prefilter_once(bundle: str, spec: dict[str, Any]) -> Prefilter:
    """Return the prefilter's result for a container's spec, without running it twice.

    Args:
        bundle: the container's bundle.
        spec: its config.json, as Create read it.

    Raises:
        FaultExitCodeWrong: the annotation does not hold an exit code.
    """
    ahead = _ahead.get(bundle)
    if ahead is None:
        return prefilter(spec)
    is_same = ahead.spec == spec  # not if Create has edited it for a pod's namespaces
    if not is_same or ahead.worker is None:
        del _ahead[bundle]
    if is_same:
        return ahead.found
    if ahead.worker is not None:
        ahead.worker.end()
    return prefilter(spec)


def _fork(bundle: str, found: Prefilter, reaper: Reaper, log: Log, *, ahead: bool) -> Worker:
    def work(link: Link) -> Answer | None:
        # Imported here: a shim without GPU requests does not need the engine, and without a fork
        # server would have to load it.
        from shim.work.provision import Provision  # noqa: PLC0415

        provision = Provision(bundle, log, link)
        if ahead:
            provision.look_ahead()
        request = link.receive()
        if request is None:
            return None
        return provision.provide(found, request["mounts"], request["runtime"], request["saved"])

    return Worker(reaper, work, log.descriptors())


async def _answer_of(worker: Worker, request: dict[str, Any]) -> Answer:
    """Return a worker's answer. After a failure, its work can be undone."""
    try:
        return await worker.ask(request)
    except BaseException:
        await worker.gone()
        raise


class Injection:
    """The injection into one container.

    Args:
        reaper: collects the worker.
        bundle: the container's bundle.
        log: the shim's log.
    """

    def __init__(self, reaper: Reaper, bundle: str, log: Log) -> None:
        self._reaper = reaper
        self._bundle = bundle
        self._log = log
        # The part of the record that a running container needs; None without an injection.
        self._record: dict[str, Any] | None = None
        # Nodes to cover with ones that the container's users own, even without a record.
        self._nodes: list[dict[str, Any]] = []
        self._told_change = False
        self._claimed = False
        self._layer = -1

    @property
    def is_empty(self) -> bool:
        """Whether nothing was injected."""
        return self._record is None

    @property
    def has_driver_layer(self) -> bool:
        """Whether a layer has the driver's files."""
        return self._record is not None and bool(self._record["driver_layer"])

    async def provide(
        self,
        found: Prefilter,
        rootfs_mounts: Sequence[Mount],
        runtime: str,
        saved: bool | None,  # noqa: FBT001 - see Args
    ) -> Sequence[Mount]:
        """Mount the container's rootfs, and grant its allowed request.

        This writes the changed spec to the bundle, and files into the rootfs, a layer of it or the
        bundle's staging directory. After a failure, :meth:`undo` reverts the changes in the bundle;
        the caller unmounts the rootfs.

        Args:
            found: the prefilter's result, which the worker does not decide again.
            rootfs_mounts: containerd's mounts for the rootfs.
            runtime: the low-level runtime that creates the container.
            saved: for a restored container, whether the driver's files were in a layer when it was
                saved; None for others.

        Returns:
            The mounts.

        Raises:
            NvshimError: the request cannot be met; the message says why.
            OSError: the process limit is reached, or the kernel refused something.
        """
        request = {"mounts": rootfs_mounts, "runtime": runtime, "saved": saved}
        try:
            value, self._layer = await self._ask(found, request)
        except loop.Cancelled:  # the error says what delayed the Create
            how = "it was cancelled"
            raise WorkerFailed("a container's files and devices", found=how) from None
        self._record, self._claimed = value["later"], value["claimed"]
        self._nodes = value["nodes"]
        mounted: list[Mount] = [tuple(each) for each in value["mounted"]]
        return mounted

    async def _ask(self, found: Prefilter, request: dict[str, Any]) -> Answer:
        ahead = _ahead.pop(self._bundle, None)
        worker = None if ahead is None else ahead.worker
        if worker is not None and worker.runs():
            try:
                return await _answer_of(worker, request)
            except NvshimError:
                if not worker.gave_up:  # at this very moment
                    raise
        worker = _fork(self._bundle, found, self._reaper, self._log, ahead=False)
        return await _answer_of(worker, request)

    async def made(self, init: int) -> None:
        """Assign the claim to the container's new init process, and cover its files.

        Args:
            init: the pid.

        Raises:
            BundleUnusable: the claim's process cannot be recorded.
        """
        claim = bundle_files.read_claim(self._bundle)[0] if self._claimed else ""
        if claim:
            bundle_files.write_claim(self._bundle, claim, init, start_time_of(init))
        await self.cover(init)

    def release(self) -> None:
        """Release the layer, the claim and the staged files of a container that has ended.

        The delete verb, for which containerd and a user wait, then has less to do.
        """
        self._release_layer()
        if self._claimed:
            try:
                bundle_files.release_claim(self._bundle)
            except (NvshimError, OSError) as error:  # the claim dies with the bundle
                self._log.warning("a claim is left", bundle=self._bundle, why=str(error))
        if self._record is not None or self._nodes:
            try:
                bundle_files.remove_staging(self._bundle)
            except OSError as error:  # containerd removes the whole bundle
                self._log.warning("staged files are left", bundle=self._bundle, why=str(error))

    def _release_layer(self) -> None:
        if self._layer < 0:
            return
        path = os.readlink(f"/proc/self/fd/{self._layer}")
        os.close(self._layer)
        self._layer = -1
        if self._record is None or not self.has_driver_layer:
            return
        from hooks.node.identity import what_changed  # noqa: PLC0415 - see _fork
        from shim.work import driver_files, layers  # noqa: PLC0415 - see _fork

        if what_changed(self._record):
            # The layer may be the last to hold a removed driver's space.
            try:
                layers.remove_unused(path)
                driver_files.sweep(os.path.dirname(path))
            except (NvshimError, OSError) as error:
                self._log.info("a layer is left", path=path, why=str(error))

    def undo(self) -> None:
        """Revert what :meth:`provide` wrote to the bundle, because the container was not created.

        Raises:
            NvshimError: config.json could not be restored.
            OSError: a file of ours could not be removed.
        """
        self._release_layer()
        # First free space: a full disk may be the reason of the failure.
        files.remove(os.path.join(self._bundle, bundle_files.RECORD))
        bundle_files.release_claim(self._bundle)
        bundle_files.remove_staging(self._bundle)
        bundle_files.restore_spec(self._bundle)

    async def cover(self, pid: int) -> None:
        """Cover files of procfs, and nodes, that the container must not see as they are.

        The results go into the record; a file that cannot be covered is not an error.

        Args:
            pid: the container's init, which has not been reaped.

        Raises:
            BundleUnusable: the record cannot be written.
        """
        covers = self._proc_files()
        if covers:
            sources = {file["path"]: file["source"] for file in covers}
            self._note(covers, await proc_cover.cover(pid, sources))
        if self._nodes:
            staging = os.path.join(self._bundle, bundle_files.STAGING)
            self._note(self._nodes, await node_cover.cover(pid, self._nodes, staging))

    async def uncover(self, pid: int) -> None:
        """Remove the mounts of :meth:`cover`, because CRIU would refuse them.

        Args:
            pid: the container's init, which has not been reaped.
        """
        for files_, uncover in (
            (self._proc_files(), proc_cover.uncover),
            (self._nodes, node_cover.uncover),
        ):
            covers = [each for each in files_ if each["state"] == proc_cover.COVERED]
            self._note(covers, await uncover(pid, [each["path"] for each in covers]))

    def _proc_files(self) -> list[dict[str, Any]]:
        return [] if self._record is None else self._record["proc_files"]

    def _note(self, covers: list[dict[str, Any]], states: dict[str, str]) -> None:
        covers = [file for file in covers if file["state"] != states[file["path"]]]
        if not covers:
            return
        path = os.path.join(self._bundle, bundle_files.RECORD)
        record = None if self._record is None else files.read(path, _LONGEST_RECORD)
        for file in covers:
            before = json.dumps(file).encode()
            file["state"] = states[file["path"]]
            if record is not None:
                # Replace only this text, instead of writing some fifty thousand bytes anew.
                record = record.replace(before, json.dumps(file).encode(), 1)
        if record is not None:
            files.write(path, record)

    def refuse_changed(self, name: str) -> None:
        """Refuse to start the container if the driver has changed since its Create.

        Args:
            name: the container's id.

        Raises:
            NvshimError: the driver has changed; the message says what.
        """
        if self._record is not None:
            from hooks.node.identity import refuse_changed  # noqa: PLC0415 - see _fork

            refuse_changed(self._record, name)

    def edit_process(self, process: dict[str, Any]) -> dict[str, Any]:
        """Return the spec of an exec, with the environment and groups that init got.

        Args:
            process: the OCI process as containerd sent it. CRI makes it from the spec before the
                injection.
        """
        if self._record is None:
            return process
        from hooks.node.identity import what_changed  # noqa: PLC0415 - see _fork
        from hooks.record import apply_to_process  # noqa: PLC0415 - see _fork

        # Users need execs to find out what is wrong in a container.
        changed = "" if self._told_change else what_changed(self._record)
        if changed:
            self._told_change = True
            self._log.warning("the driver of a running container has changed", why=changed)
        return apply_to_process(process, self._record)
