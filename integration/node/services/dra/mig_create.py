"""MIG devices that are made for claims, and the MIG mode that they need. Acts; for a thread.

::

    note in STATE/dra-mig-mode.json ─▶ nvidia-smi -mig 1 ─▶ NVML: it is on ─▶ … claims …
    note in STATE/dra-mig.json ─▶ nvidia-smi mig -cgi -C ─▶ NVML has it ─▶ its UUID is noted, too
    NVML has it ─▶ nvidia-smi mig -dci ─▶ nvidia-smi mig -dgi ─▶ the note is removed
    no MIG device is left ─▶ nvidia-smi -mig 0 ─▶ NVML: it is off ─▶ the note is removed

Rules
- What is to be made or switched is written down before: for which claim, and where on which GPU. So
  whoever comes after an agent that was killed finds what it has done, and goes on from there or
  undoes it. At one place of a GPU there is one GPU instance at most, so nothing is made twice.
- NVML says what there is, before and after; what nvidia-smi prints is for people. It ends with 0
  also where it has switched nothing, as for a GPU that is in use. It ends with the agent.
- Nothing is made where another claim's is, or where one is still to be undone.
- What could not be made is undone at once, or later (:meth:`Making.orphans`).
- Neither instances nor modes that can be switched so outlive a boot, and neither do the notes. On a
  GPU that does not answer nothing can be undone: its reset does that, or we do once it answers.
- Only the mode of a GPU that we have switched on is switched off: one that a person has set stays.
  A GPU that a person has cut meanwhile is that person's: its mode stays, and the note goes.
- Nobody of us has NVML open while a mode is switched (:mod:`integration.nvml.lock`): that has every
  GPU open. A shim that begins a container may, for a moment, once after each change of the driver:
  it does not take the lock, for no container is to wait for a switch. The switch fails then, the
  claim is refused, and the kubelet asks again.

Source: NVIDIA's MIG user guide; nvidia-smi(1), nvidia-smi mig -h; kubernetes-sigs/
dra-driver-nvidia-gpu, nvlib.go (when it switches).
"""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final

from api.errors import NvshimError
from hooks.node.drained import driver_of, read_drains
from integration.agent_errors import (
    ClaimedDeviceMissing,
    DeviceTaken,
    MigDeviceNotMade,
    MigDeviceNotUndone,
    MigModeNotSwitched,
)
from integration.devices.creating import CreateOptions, create
from integration.node.services.dra.mig_layout import Part, Parts, overlaps, parse_name, parse_parts
from integration.node.state.claims_file import known_of, read_record, write_record
from integration.nvml.inventory import inventory_of
from integration.nvml.lock import exclusive
from integration.nvml.nvidia_smi import SmiFailed, run_nvidia_smi
from integration.nvml.query import ask_nvml
from integration.timeouts import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Mapping

    from hooks.config import Config
    from hooks.node.gpus import Gpu
    from hooks.node.inventory import Inventory
    from integration.node.values.claims import Claim, ClaimDevice

__all__ = ["Making", "Modes", "ask_parts", "is_unmade"]

_MODES: Final = "dra-mig-mode.json"
_MADE: Final = "dra-mig.json"
# Seconds, together less than a kubelet waits for all of a claim (45).
_TO_CLOSE: Final = 5.0 * PATIENCE
_TO_SWITCH: Final = 12.0 * PATIENCE
_TO_ACT: Final = 12.0 * PATIENCE

_UNREAD: Final = (OSError, ValueError, KeyError, TypeError, AttributeError)


def ask_parts(config: Config) -> Parts:
    """What NVML says now of all that GPUs are cut into.

    Raises:
        SmiFailed: it does not say.
    """
    try:
        parts = parse_parts(ask_nvml(config, "parts"))
    except NvshimError as error:
        raise SmiFailed(f"NVML cannot be asked: {error}") from error
    if parts.failure:
        raise SmiFailed(f"NVML does not say what there is: {parts.failure}")
    return parts


class Modes:
    """Switches. Two threads may, for different GPUs."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.switched: frozenset[str] = frozenset()
        """The UUIDs of the GPUs whose mode was switched on for claims."""
        self._one_writes = threading.Lock()

    def load(self) -> None:
        """Know what an agent before this one has switched on, in this boot."""
        try:
            self.switched = frozenset(map(str, read_record(self._config, _MODES)["gpus"]))
        except _UNREAD:
            self.switched = frozenset()

    def on(self, gpu: Gpu, inventory: Inventory, whom: str) -> None:
        """Have a GPU be in MIG mode.

        Args:
            whom: for whom, for messages.

        Raises:
            MigModeNotSwitched: it cannot be; its mode is as before then, or is set back later.
            DraStateUnwritten: it cannot be written down.
        """
        is_ours = False
        try:
            if self._is_on(gpu):
                return  # by us before, or by a person just now
            self._note(gpu.uuid, on=True)
            is_ours = True
            self._switch(gpu, inventory, on=True)
        except SmiFailed as error:
            with suppress(MigModeNotSwitched):  # what is pending would come with a reset
                if is_ours:
                    self.off(gpu, inventory)
                    self.forget(gpu.uuid)
            raise MigModeNotSwitched(
                f"to switch MIG mode of {gpu.uuid} on for {whom}", found=error.found, do=error.do
            ) from error

    def off(self, gpu: Gpu, inventory: Inventory) -> None:
        """Have a GPU be whole again, of which claims have nothing any more; then it is forgotten.

        Raises:
            MigModeNotSwitched: it cannot be; it is to be tried again.
        """
        try:
            there = ask_parts(self._config).gpus.get(gpu.uuid)
            if there is None:
                raise SmiFailed("NVML does not tell of it")  # noqa: TRY301 - as what else fails
            if not there.instances:
                self._switch(gpu, inventory, on=False)
        except SmiFailed as error:
            raise MigModeNotSwitched(
                f"to switch MIG mode of {gpu.uuid} off, for nobody has a part of it any more",
                found=error.found, do=error.do,
            ) from error  # fmt: skip

    def forget(self, uuid: str) -> None:
        """Forget a GPU that is whole, or a person's.

        Raises:
            DraStateUnwritten: it cannot be written down.
        """
        self._note(uuid, on=False)

    def _switch(self, gpu: Gpu, inventory: Inventory, *, on: bool) -> None:
        arguments = ("-i", gpu.bus_id, "-mig", str(int(on)))
        with ExitStack() as stack:
            try:
                lock = stack.enter_context(exclusive(self._config.state, _TO_CLOSE))
            except OSError as error:
                raise SmiFailed(f"{error.filename}: {error.strerror}") from error
            if lock is None:
                raise SmiFailed("a program of ours that asks NVML has it open still")
            said = run_nvidia_smi(
                inventory.driver, self._config, arguments, _TO_SWITCH, ends_with_us=True, lock=lock
            )
        if self._is_on(gpu) is not on:
            raise SmiFailed(f"it is not: {said}")

    def _is_on(self, gpu: Gpu) -> bool:
        there = ask_parts(self._config).gpus.get(gpu.uuid)
        return there is not None and there.mode

    def _note(self, uuid: str, *, on: bool) -> None:
        with self._one_writes:
            switched = self.switched | {uuid} if on else self.switched - {uuid}
            if switched != self.switched:
                write_record(self._config, _MODES, "gpus", json.dumps(sorted(switched)))
                self.switched = switched


@dataclass(frozen=True, slots=True)
class Note:
    """What is made, or to be made, for a claim."""

    claim: str  # the claim's UID
    title: str  # the claim, for people
    part: Part  # where on which GPU
    uuid: str = ""  # of the device; "" until it is known


def is_unmade(device: ClaimDevice) -> bool:
    """Whether a device of a claim has yet to be made: its name stands for its UUID."""
    return device.uuid == device.device


class Making:
    """Makes and undoes. Two threads may, for different GPUs."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._notes: dict[str, Note] = {}
        self._one_writes = threading.Lock()

    def load(self) -> None:
        """Know what an agent before this one has made, in this boot."""
        try:
            notes = [
                Note(
                    each["claim"], each["title"], Part(**known_of(Part, each["part"])), each["uuid"]
                )
                for each in read_record(self._config, _MADE)["made"]
            ]
            self._notes = {note.part.name: note for note in notes}
        except _UNREAD:
            self._notes = {}

    @property
    def made(self) -> dict[Part, str]:
        """What was made, or is being made: its UUID, "" until that is known."""
        return {note.part: note.uuid for note in self._notes.values()}

    def gpus(self) -> set[str]:
        """The UUIDs of the GPUs on which something was made, or is being made."""
        return {note.part.gpu for note in self._notes.values()}

    def gpus_of(self, claim: str) -> set[str]:
        """The UUIDs of the GPUs on which something was made for a claim, by its UID."""
        return {note.part.gpu for note in self._notes.values() if note.claim == claim}

    def orphans(self, claims: Container[str]) -> set[str]:
        """The UIDs of claims that are not prepared, and for which something was made."""
        return {note.claim for note in self._notes.values() if note.claim not in claims}

    def settled(self, claim: Claim, parts: Parts) -> Claim | None:
        """A claim of an agent before this one, with the UUIDs of what was made for it.

        Args:
            claim: as that agent, or the kubelet, has noted it.

        Returns:
            None if something of it was not made yet: then nobody was told of the claim.
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

    def _adopted(self, claim: Claim, device: ClaimDevice, parts: Parts) -> Note | None:
        """What is at the place of a device whose note is lost."""
        part = parts.named(device.device)
        uuid = parts.device_at(part) if part is not None else ""
        if part is None or not uuid:
            return None
        note = Note(claim.uid, str(claim), part, uuid)
        self._note(note)
        return note

    # Making

    def make(self, claim: Claim, parts: Mapping[str, Part], inventory: Inventory) -> Claim:
        """Make what a claim is to have.

        Args:
            parts: where each of the devices that are made for claims is, by their names.

        Returns:
            The claim with the devices' UUIDs. Nodes of all of them are there.

        Raises:
            ClaimedDeviceMissing: somebody is to look after a device that is not there.
            DeviceTaken: another claim's device is in its place.
            MigDeviceNotMade: it cannot be made.
            DraStateUnwritten: it cannot be written down.
        """
        devices = tuple(
            self._made(claim, device, parts[device.device], inventory)
            if is_unmade(device)
            else device
            for device in claim.devices
        )
        create(self._config, CreateOptions())  # as a driver may leave it to others
        return replace(claim, devices=devices)

    def _made(
        self, claim: Claim, device: ClaimDevice, part: Part, inventory: Inventory
    ) -> ClaimDevice:
        asked = f"the device {device.device} of {claim}"
        if device.admin:
            raise ClaimedDeviceMissing(
                asked, found="it is made for who has it, and nobody has", do="wait for its claim"
            )
        self._refuse_taken(claim, part, asked)
        gpu = _gpu(inventory, part)
        if gpu is None:
            raise MigDeviceNotMade(f"to make {asked}", found=f"{part.gpu} is not there")
        is_known = part.name in self._notes
        self._note(Note(claim.uid, str(claim), part))
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
            raise MigDeviceNotMade(f"to make {asked}", found="nvidia-smi is content, NVML has none")
        self._note(Note(claim.uid, str(claim), part, uuid))
        return replace(device, uuid=uuid)

    def _refuse_taken(self, claim: Claim, part: Part, asked: str) -> None:
        for note in tuple(self._notes.values()):
            if note.claim != claim.uid and note.part.gpu == part.gpu and overlaps(note.part, part):
                raise DeviceTaken(asked, found=f"{note.title} has {note.part.name}")

    def newest(self) -> Inventory:
        """What the node has now, with what was just made.

        Raises:
            NvshimError: there is no driver.
        """
        return inventory_of(self._config, fresh=True)

    # Undoing

    def undo(self, claim: str, inventory: Inventory | None) -> tuple[Note, ...]:
        """Undo what was made for a claim; nothing if nothing was.

        Args:
            claim: its UID.

        Returns:
            What is no more, to be forgotten.

        Raises:
            MigDeviceNotUndone: it cannot be undone.
        """
        notes = tuple(each for each in self._notes.values() if each.claim == claim)
        undone = []
        for note in notes:
            gpu = None if inventory is None else _gpu(inventory, note.part)
            is_out = bool(driver_of(read_drains(self._config)))
            if inventory is not None and gpu is not None and not gpu.lost and not is_out:
                self._undo(note, gpu, inventory)
                undone.append(note)
        return tuple(undone)

    def forget(self, notes: Collection[Note]) -> None:
        """Forget what is no more.

        Raises:
            DraStateUnwritten: that cannot be written down.
        """
        with self._one_writes:
            self._write({name: each for name, each in self._notes.items() if each not in notes})

    def _undo(self, note: Note, gpu: Gpu, inventory: Inventory) -> None:
        try:
            there = ask_parts(self._config)
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

    def _note(self, note: Note) -> None:
        with self._one_writes:
            self._write({**self._notes, note.part.name: note})

    def _write(self, notes: dict[str, Note]) -> None:
        """Write down what is made, and go by it then."""
        made = json.dumps([asdict(note) for note in notes.values()])
        write_record(self._config, _MADE, "made", made)
        self._notes = notes


def _gpu(inventory: Inventory, part: Part) -> Gpu | None:
    return next((each for each in inventory.gpus if each.uuid == part.gpu), None)
