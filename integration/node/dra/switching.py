"""MIG mode of GPUs, switched on for the first MIG device of a claim and off after the last.

::

    note in STATE/dra-mig-mode.json ─▶ nvidia-smi -mig 1 ─▶ NVML: it is on ─▶ … claims …
    no MIG device is left ─▶ nvidia-smi -mig 0 ─▶ NVML: it is off ─▶ the note is removed

Rules
- Only the mode of a GPU that we have switched on is switched off: one that a person has set stays.
  So it is written down before, and whoever comes after an agent that was killed goes on from there.
- A GPU that a person has cut meanwhile is that person's: its mode stays, and the note goes.
- NVML says what the mode is. nvidia-smi ends with 0 also where it has switched nothing, as for a
  GPU that is in use, or whose mode waits for a reset.
- Nobody of us has NVML open meanwhile (:mod:`integration.nvml_lock`): it has every GPU open.
- The mode outlives no boot, on the GPUs whose mode can be switched so, and neither does the note.

Source: NVIDIA's MIG user guide, "Enable MIG Mode"; nvidia-smi(1); kubernetes-sigs/
dra-driver-nvidia-gpu, nvlib.go (when it switches).
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final

from api.errors import NvshimError
from hooks.node.cache import boot_id_path
from hooks.node.witness import read_text
from integration.files import read_file, replace_file
from integration.node.dra.parts import Parts, parse_parts
from integration.node.errors import DraStateUnwritten, MigModeNotSwitched
from integration.node.nvidia_smi import SmiFailed, run_nvidia_smi
from integration.node.nvml import ask_nvml
from integration.nvml_lock import alone
from integration.timeouts import PATIENCE

if TYPE_CHECKING:
    from hooks.config import Config
    from hooks.node.gpus import Gpu
    from hooks.node.inventory import Inventory

__all__ = ["Modes", "ask_parts"]

_FILE: Final = "dra-mig-mode.json"
_FORMAT: Final = 1
_MODE: Final = 0o600
# Together less than a kubelet waits, with what is made afterwards.
_TO_CLOSE: Final = 5.0 * PATIENCE
_TO_SWITCH: Final = 12.0 * PATIENCE


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
    """Switches. Acts; for a thread, and for one GPU one after the other."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._switched: frozenset[str] = frozenset()

    def load(self) -> None:
        """Know what an agent before this one has switched on, in this boot."""
        try:
            document: Any = json.loads(read_file(self._path) or b"")
            if document["format"] == _FORMAT and document["boot"] == self._boot():
                self._switched = frozenset(map(str, document["gpus"]))
        except (OSError, ValueError, KeyError, TypeError):
            self._switched = frozenset()

    @property
    def switched(self) -> frozenset[str]:
        """The UUIDs of the GPUs whose mode was switched on for claims."""
        return self._switched

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
            self._note(self._switched | {gpu.uuid})
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
        self._note(self._switched - {uuid})

    def _switch(self, gpu: Gpu, inventory: Inventory, *, on: bool) -> None:
        arguments = ("-i", gpu.bus_id, "-mig", str(int(on)))
        with ExitStack() as stack:
            try:
                lock = stack.enter_context(alone(self._config.state, _TO_CLOSE))
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

    @property
    def _path(self) -> str:
        return os.path.join(self._config.state, _FILE)

    def _boot(self) -> str:
        return (read_text(boot_id_path(self._config)) or "").strip()

    def _note(self, switched: frozenset[str]) -> None:
        if switched == self._switched:
            return
        document = {"format": _FORMAT, "boot": self._boot(), "gpus": sorted(switched)}
        try:
            replace_file(self._path, f"{json.dumps(document)}\n".encode(), mode=_MODE)
        except OSError as error:
            found = error.strerror or str(error)
            raise DraStateUnwritten(f"to write {self._path}", found=found) from error
        self._switched = switched
