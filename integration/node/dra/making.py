"""MIG devices that are made for claims, and undone again. Acts; for a thread.

::

    note in STATE/dra-mig.json ─▶ nvidia-smi mig -cgi -C ─▶ NVML has it ─▶ its UUID is noted, too
    NVML has it ─▶ nvidia-smi mig -dci ─▶ nvidia-smi mig -dgi ─▶ the note is removed

Rules
- What is to be made is written down before: for which claim, and where on which GPU. So whoever
  comes after an agent that was killed finds what it has made, and goes on from there or undoes it.
  At one place of a GPU there is one GPU instance at most, so nothing is made twice.
- Nothing is made where another claim's is, or where one is still to be undone.
- NVML says what there is, before and after; what nvidia-smi prints is for people. nvidia-smi ends
  with the agent, whatever ends that.
- What could not be made is undone at once, or later (:meth:`Making.orphans`).
- Instances do not outlive a boot, and neither do the notes. On a GPU that does not answer nothing
  can be undone: its reset does that, or we do once it answers.

Source: NVIDIA's MIG user guide; nvidia-smi mig -h.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from hooks.node.cache import boot_id_path
from hooks.node.drained import driver_of, read_drains
from hooks.node.witness import read_text
from integration.devices.creating import Wish, create
from integration.files import read_file, replace_file
from integration.inventory import inventory_of
from integration.node.dra.parts import Part, Parts, overlaps, parse_name
from integration.node.dra.switching import ask_parts
from integration.node.errors import (
    ClaimedDeviceMissing,
    DeviceTaken,
    DraStateUnwritten,
    MigDeviceNotMade,
    MigDeviceNotUndone,
)
from integration.node.nvidia_smi import SmiFailed, run_nvidia_smi
from integration.timeouts import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Mapping

    from hooks.config import Config
    from hooks.node.gpus import Gpu
    from hooks.node.inventory import Inventory
    from integration.node.dra.values import Claim, ClaimDevice

__all__ = ["Making", "is_unmade"]

_FILE: Final = "dra-mig.json"
_FORMAT: Final = 1
_MODE: Final = 0o600
_TO_ACT: Final = 12.0 * PATIENCE
"""Seconds that nvidia-smi may take. A kubelet waits 45 s for all of a claim."""


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
            document: Any = json.loads(read_file(self._path) or b"")
            if document["format"] == _FORMAT and document["boot"] == self._boot():
                notes = [
                    Note(each["claim"], each["title"], Part(**each["part"]), each["uuid"])
                    for each in document["made"]
                ]
                self._notes = {note.part.name: note for note in notes}
        except (OSError, ValueError, KeyError, TypeError):
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
            parts: what NVML says.

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
            inventory: what the node has.

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
        create(self._config, Wish())  # as a driver may leave it to others
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
            there = self._ask() if is_known else Parts()
            instance = there.instance_at(part)
            if instance is None:
                self._smi(inventory, *where, "-cgi", f"{part.profile}:{part.start}", "-C")
            elif not there.device_at(part):
                self._smi(inventory, *where, "-gi", str(instance.id), "-cci")
            uuid = self._ask().device_at(part)
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
        return inventory_of(self._config, anew=True)

    # Undoing

    def undo(self, claim: str, inventory: Inventory | None) -> tuple[Note, ...]:
        """Undo what was made for a claim; nothing if nothing was.

        Args:
            claim: its UID.
            inventory: what the node has.

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
            there = self._ask()
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

    def _ask(self) -> Parts:
        return ask_parts(self._config)

    def _smi(self, inventory: Inventory, *arguments: str) -> None:
        run_nvidia_smi(inventory.driver, self._config, arguments, _TO_ACT, ends_with_us=True)

    @property
    def _path(self) -> str:
        return os.path.join(self._config.state, _FILE)

    def _boot(self) -> str:
        return (read_text(boot_id_path(self._config)) or "").strip()

    def _note(self, note: Note) -> None:
        with self._one_writes:
            self._write({**self._notes, note.part.name: note})

    def _write(self, notes: dict[str, Note]) -> None:
        """Write down what is made, and go by it then.

        Raises:
            DraStateUnwritten: it cannot be done. What was written before is there still.
        """
        made = [asdict(note) for note in notes.values()]
        document = {"format": _FORMAT, "boot": self._boot(), "made": made}
        try:
            replace_file(self._path, f"{json.dumps(document)}\n".encode(), mode=_MODE)
        except OSError as error:
            found = error.strerror or str(error)
            raise DraStateUnwritten(f"to write {self._path}", found=found) from error
        self._notes = notes


def _gpu(inventory: Inventory, part: Part) -> Gpu | None:
    return next((each for each in inventory.gpus if each.uuid == part.gpu), None)
