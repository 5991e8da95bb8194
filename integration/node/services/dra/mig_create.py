"""Create and delete MIG devices with nvidia-smi, and switch MIG mode. Blocks; for a thread.

::

    note in STATE/dra-mig-mode.json ─▶ nvidia-smi -mig 1 ─▶ NVML: mode is on ─▶ … claims …
    note in STATE/dra-mig.json ─▶ nvidia-smi mig -cgi -C ─▶ NVML has it ─▶ its UUID in the note
    NVML has it ─▶ nvidia-smi mig -dci ─▶ nvidia-smi mig -dgi ─▶ remove the note
    no MIG device is left ─▶ nvidia-smi -mig 0 ─▶ NVML: mode is off ─▶ remove the note

Rules
- Before the driver creates or switches anything, it writes a note: for which claim, and where on
  which GPU. After an agent was killed, the next one continues from there, or deletes the device.
  Each place on a GPU has at most one GPU instance, so no device is created twice.
- Only NVML's answer counts, before and after: the output of nvidia-smi is meant for people. It also
  exits with 0 if it has switched nothing, for example because the GPU is in use. It is killed if
  the agent exits.
- Nothing is created where another claim has a device, or where a device has to be deleted first.
- A device whose creation failed is deleted at once, or later (:meth:`MigCreator.orphans`).
- A reboot removes instances, switched modes and notes. On a GPU that does not answer, nothing can
  be deleted; a reset of the GPU does that, or the driver once the GPU answers again.
- Only a mode that the driver switched on is switched off; a mode that an administrator set stays.
  If an administrator has created instances since, the GPU keeps its mode and the note is removed.
- The agent has NVML closed while a mode is switched (:mod:`integration.nvml.lock`), since NVML
  opens every GPU. After a driver change, a shim that starts a container may have NVML open for a
  moment. It does not take the lock, so that containers start without waiting. In that case the
  switch fails, the claim is refused, and the kubelet calls again.

Source: NVIDIA's MIG user guide; nvidia-smi(1), nvidia-smi mig -h; kubernetes-sigs/
dra-driver-nvidia-gpu, nvlib.go (when it switches).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Final

from hooks.config import Config
from hooks.node.drained import driver_of, read_drains
from hooks.node.gpus import Gpu
from hooks.node.inventory import Inventory
from integration.agent_errors import (
    ClaimedDeviceMissing,
    DeviceTaken,
    MigDeviceNotMade,
    MigDeviceNotUndone,
    MigModeNotSwitched,
)
from integration.devices.creating import CreateOptions, create
from integration.node.services.dra.mig_layout import Part, parse_name, part_named
from integration.node.state.claims_file import known_fields, read_record, write_record
from integration.node.values.claims import Claim, ClaimDevice
from integration.nvml.inventory import inventory_of
from integration.nvml.mig_parts import GpuParts, Parts, ask_parts, overlaps
from integration.nvml.nvidia_smi import SmiFailed, run_alone, run_nvidia_smi
from integration.timeouts import PATIENCE

__all__ = ["MigCreator", "MigModes", "is_unmade"]

_MODES: Final = "dra-mig-mode.json"
_MADE: Final = "dra-mig.json"
# Seconds; in sum, with TO_CLOSE, below the 45 s that a kubelet waits for an answer.
_TO_SWITCH: Final = 12.0 * PATIENCE
_TO_ACT: Final = 12.0 * PATIENCE

_UNREAD: Final = (OSError, ValueError, KeyError, TypeError, AttributeError)


class MigModes:
    """Switches MIG mode. Threads may use it at the same time, for different GPUs."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.switched: frozenset[str] = frozenset()
        """UUIDs of the GPUs whose mode the driver switched on."""
        self._one_writes = threading.Lock()

    def load(self) -> None:
        """Read which modes an earlier agent of this boot switched on."""
        try:
            self.switched = frozenset(map(str, read_record(self._config, _MODES)["gpus"]))
        except _UNREAD:
            self.switched = frozenset()

    def on(self, gpu: Gpu, inventory: Inventory, whom: str) -> None:
        """Switch MIG mode of a GPU on.

        Args:
            whom: the claim, for messages.

        Raises:
            MigModeNotSwitched: switching failed; the mode has not changed, or is reset later.
            DraStateUnwritten: the note cannot be written.
        """
        is_ours = False
        try:
            if self._is_on(gpu):
                return  # an earlier claim, or an administrator, switched it on
            self._note(gpu.uuid, on=True)
            is_ours = True
            self._switch(gpu, inventory, on=True)
        except SmiFailed as error:
            with suppress(MigModeNotSwitched):  # a pending mode would be set by the next reset
                if is_ours:
                    self.off(gpu, inventory)
                    self.forget(gpu.uuid)
            raise MigModeNotSwitched(
                f"to switch MIG mode of {gpu.uuid} on for {whom}", found=error.found, do=error.do
            ) from error

    def is_on(self, gpu: Gpu) -> bool:
        """Return whether MIG mode of a GPU is on; False if NVML does not tell."""
        try:
            return self._is_on(gpu)
        except SmiFailed:
            return False

    def off(self, gpu: Gpu, inventory: Inventory) -> None:
        """Switch MIG mode of a GPU off, unless an administrator created instances.

        Raises:
            MigModeNotSwitched: switching failed; the caller tries again.
        """
        try:
            if not self._parts(gpu).instances:
                self._switch(gpu, inventory, on=False)
        except SmiFailed as error:
            raise MigModeNotSwitched(
                f"to switch MIG mode of {gpu.uuid} off, because no claim has a part of it",
                found=error.found, do=error.do,
            ) from error  # fmt: skip

    def forget(self, uuid: str) -> None:
        """Remove the note of a GPU whose mode is off, or is an administrator's.

        Raises:
            DraStateUnwritten: writing failed.
        """
        self._note(uuid, on=False)

    def _switch(self, gpu: Gpu, inventory: Inventory, *, on: bool) -> None:
        arguments = ("-i", gpu.bus_id, "-mig", str(int(on)))
        said = run_alone(inventory.driver, self._config, arguments, _TO_SWITCH, ends_with_us=True)
        if self._is_on(gpu) is not on:
            raise SmiFailed(f"it is not: {said}")

    def _is_on(self, gpu: Gpu) -> bool:
        return self._parts(gpu).mode

    def _parts(self, gpu: Gpu) -> GpuParts:
        return _listed(ask_parts(self._config), gpu.uuid)

    def _note(self, uuid: str, *, on: bool) -> None:
        with self._one_writes:
            switched = self.switched | {uuid} if on else self.switched - {uuid}
            if switched != self.switched:
                write_record(self._config, _MODES, "gpus", json.dumps(sorted(switched)))
                self.switched = switched


@dataclass(frozen=True, slots=True)
class MigNote:
    """A MIG device that is, or will be, created for a claim."""

    claim: str  # the claim's UID
    title: str  # the claim, for messages
    part: Part  # where on which GPU
    uuid: str = ""  # of the device; "" before it exists


def is_unmade(device: ClaimDevice) -> bool:
    """Return whether a device of a claim has not been created: its name stands in for its UUID."""
    return device.uuid == device.device


class MigCreator:
    """Creates and deletes devices. Threads may use it at the same time, for different GPUs."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._notes: dict[str, MigNote] = {}
        self._one_writes = threading.Lock()

    def load(self) -> None:
        """Read what an earlier agent of this boot created."""
        try:
            notes = [
                MigNote(
                    each["claim"],
                    each["title"],
                    Part(**known_fields(Part, each["part"])),
                    each["uuid"],
                )
                for each in read_record(self._config, _MADE)["made"]
            ]
            self._notes = {note.part.name: note for note in notes}
        except _UNREAD:
            self._notes = {}

    @property
    def created(self) -> dict[Part, str]:
        """The UUID of each device that was, or is being, created; "" before it is known."""
        return {note.part: note.uuid for note in self._notes.values()}

    def gpus(self) -> set[str]:
        """Return the UUIDs of the GPUs that have created devices."""
        return {note.part.gpu for note in self._notes.values()}

    def gpus_of(self, claim: str) -> set[str]:
        """Return the UUIDs of the GPUs on which devices were created for a claim, by its UID."""
        return {note.part.gpu for note in self.notes_of(claim)}

    def notes_of(self, claim: str) -> tuple[MigNote, ...]:
        """Return the notes of the devices that were created for a claim, by its UID."""
        return tuple(note for note in self._notes.values() if note.claim == claim)

    def orphans(self, claims: Mapping[str, Claim]) -> tuple[MigNote, ...]:
        """Return the notes of devices that no claim has; the claims are by their UIDs."""
        return tuple(
            note
            for note in self._notes.values()
            if note.claim not in claims
            or not any(note.part.is_called(each.device) for each in claims[note.claim].held)
        )

    def settled(self, claim: Claim, parts: Parts) -> Claim | None:
        """Return a claim of an earlier agent with the UUIDs of its created devices.

        Args:
            claim: the claim as that agent, or the kubelet, recorded it.

        Returns:
            The claim; None if a device was not created, in which case the kubelet got no answer.
        """
        devices = []
        for device in claim.devices:
            uuid = device.uuid
            if parse_name(device.device) and not device.admin:
                note = self._notes.get(device.device) or self._adopted(claim, device, parts)
                uuid = note.uuid if note is not None and note.claim == claim.uid else ""
            if not uuid:
                return None
            devices.append(replace(device, uuid=uuid))
        return replace(claim, devices=tuple(devices))

    def _adopted(self, claim: Claim, device: ClaimDevice, parts: Parts) -> MigNote | None:
        """Return a new note for an existing device whose note is lost."""
        part = part_named(parts, device.device)
        uuid = parts.device_at(part) if part is not None else ""
        if part is None or not uuid:
            return None
        note = MigNote(claim.uid, str(claim), part, uuid)
        self._note(note)
        return note

    # Creating

    def create(self, claim: Claim, parts: Mapping[str, Part], inventory: Inventory) -> Claim:
        """Create those MIG devices of a claim that do not exist yet.

        Args:
            parts: the place of each device that the driver can create, by the device's name.

        Returns:
            The claim with the devices' UUIDs. Their device nodes exist.

        Raises:
            ClaimedDeviceMissing: the claim has admin access to a device that does not exist.
            DeviceTaken: another claim has a device at that place.
            MigDeviceNotMade: a device could not be created.
            DraStateUnwritten: the note cannot be written.
        """
        devices = tuple(
            self._created(claim, device, parts[device.device], inventory)
            if is_unmade(device)
            else device
            for device in claim.devices
        )
        create(self._config, CreateOptions())  # drivers may leave device nodes to others
        return replace(claim, devices=devices)

    def _created(
        self, claim: Claim, device: ClaimDevice, part: Part, inventory: Inventory
    ) -> ClaimDevice:
        asked = f"the device {device.device} of {claim}"
        if device.admin:
            raise ClaimedDeviceMissing(
                asked,
                found="admin access needs an existing MIG device; none exists",
                do="wait for the claim that uses it",
            )
        self._refuse_taken(claim, part, asked)
        gpu = _gpu(inventory, part)
        if gpu is None:
            raise MigDeviceNotMade(f"to make {asked}", found=f"the node no longer has {part.gpu}")
        is_known = part.name in self._notes
        self._note(MigNote(claim.uid, str(claim), part))
        where = ["mig", "-i", gpu.uuid]
        try:
            there = ask_parts(self._config) if is_known else Parts()
            instance = there.instance_at(part)
            if instance is None:
                self._smi(inventory, *where, "-cgi", f"{part.profile}:{part.start}", "-C")
            elif not there.device_at(part):
                self._smi(inventory, *where, "-gi", str(instance.id), "-cci")
            uuid = ask_parts(self._config).device_at(part)
        except SmiFailed as error:
            raise MigDeviceNotMade(f"to make {asked}", found=error.found, do=error.do) from error
        if not uuid:
            raise MigDeviceNotMade(
                f"to make {asked}", found="nvidia-smi succeeded, but NVML does not list the device"
            )
        self._note(MigNote(claim.uid, str(claim), part, uuid))
        return replace(device, uuid=uuid)

    def _refuse_taken(self, claim: Claim, part: Part, asked: str) -> None:
        for note in tuple(self._notes.values()):
            if note.claim != claim.uid and note.part.gpu == part.gpu and overlaps(note.part, part):
                raise DeviceTaken(asked, found=f"{note.title} has {note.part.name}")

    def newest(self) -> Inventory:
        """Make a new inventory, which includes the devices that were just created.

        Raises:
            NvshimError: there is no driver.
        """
        return inventory_of(self._config, fresh=True)

    # Deleting

    def delete(
        self, notes: Collection[MigNote], inventory: Inventory | None
    ) -> tuple[MigNote, ...]:
        """Delete devices that were created for claims.

        Returns:
            The notes of the deleted devices, for :meth:`forget`.

        Raises:
            MigDeviceNotUndone: a device could not be deleted.
        """
        deleted = []
        for note in notes:
            gpu = None if inventory is None else _gpu(inventory, note.part)
            is_out = bool(driver_of(read_drains(self._config)))
            if inventory is not None and gpu is not None and not gpu.lost and not is_out:
                self._delete(note, gpu, inventory)
                deleted.append(note)
        return tuple(deleted)

    def forget(self, notes: Collection[MigNote]) -> None:
        """Remove the notes of devices that no longer exist.

        Raises:
            DraStateUnwritten: writing failed.
        """
        with self._one_writes:
            self._write({name: each for name, each in self._notes.items() if each not in notes})

    def _delete(self, note: MigNote, gpu: Gpu, inventory: Inventory) -> None:
        try:
            there = ask_parts(self._config)
            _listed(there, note.part.gpu)
            instance = there.instance_at(note.part)
            if instance is None:
                return
            where = ["mig", "-i", gpu.uuid, "-gi", str(instance.id)]
            if there.device_at(note.part):
                self._smi(inventory, *where, "-dci")
            self._smi(inventory, *where, "-dgi")
        except SmiFailed as error:
            raise MigDeviceNotUndone(
                f"to undo {note.part.name}, made for {note.title}", found=error.found, do=error.do
            ) from error

    # NVML, nvidia-smi, the file

    def _smi(self, inventory: Inventory, *arguments: str) -> None:
        run_nvidia_smi(inventory.driver, self._config, arguments, _TO_ACT, ends_with_us=True)

    def _note(self, note: MigNote) -> None:
        with self._one_writes:
            self._write({**self._notes, note.part.name: note})

    def _write(self, notes: dict[str, MigNote]) -> None:
        """Write the notes, then keep them in memory."""
        made = json.dumps([asdict(note) for note in notes.values()])
        write_record(self._config, _MADE, "made", made)
        self._notes = notes


def _gpu(inventory: Inventory, part: Part) -> Gpu | None:
    return next((each for each in inventory.gpus if each.uuid == part.gpu), None)


def _listed(parts: Parts, uuid: str) -> GpuParts:
    """Return the parts of a GPU.

    Raises:
        SmiFailed: NVML does not list the GPU now, so its parts are unknown.
    """
    if uuid not in parts.gpus:
        raise SmiFailed("NVML does not list it")
    return parts.gpus[uuid]
