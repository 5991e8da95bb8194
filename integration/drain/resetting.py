"""Reset a GPU: mark it, wait for its holders, let nvidia-smi reset it, and check that it answers.

::

    mark: draining ─▶ mark: closing ─▶ mark: resetting ─▶ nvidia-smi ─▶ mark: proving ─▶ NVML
        other holders are gone  no holder is left                            mark removed

Rules
- The mark names the current step. An interrupted reset leaves the GPU out of service, with the
  step as the reason. The same command continues from there.
- A failed reset leaves the GPU out of service, with the reason in the mark.
- A GPU that a person had already taken out of service stays so, with that person's reason.
- The node agent closes NVML, and with it all GPUs, as soon as the other holders are gone, because
  nvidia-smi cannot reset an open GPU. It opens NVML again when the command exits, whatever the
  result (:mod:`integration.devices.drain_marks`).
- The reset waits for those of our processes that are about to open NVML, and no other may start to
  open it before nvidia-smi exits (:mod:`integration.nvml.lock`). Then it checks for holders once
  more.
- The proof of success is a new answer from NVML: it lists the GPU and can open it.

Source: nvidia-smi(1), "--gpu-reset".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from api.errors import NvshimError, one_line
from hooks import engine
from hooks.config import Config
from hooks.node.drained import Drain
from hooks.node.inventory import Inventory
from integration.devices import drain_marks as marks
from integration.devices.drain_errors import ResetFailed, ResetUnproven, StillHeld
from integration.devices.targets import Target
from integration.drain.holders import Holder
from integration.nvml.nvidia_smi import NvmlInUse, SmiFailed, run_alone
from integration.nvml.query import probe
from integration.timeouts import PATIENCE

DRAINING: Final = "waits for its holders"
CLOSING: Final = "the node agent closes NVML"
RESETTING: Final = "nvidia-smi resets it"
PROVING: Final = "NVML checks that it works again"

_DO: Final = "do what it says, and run it again; some GPUs are reset by a reboot alone"
_TO_RESET: Final = 180.0 * PATIENCE
_TO_PROVE: Final = 30.0 * PATIENCE
_PAUSE: Final = 0.5


class Reset:
    """The reset of one GPU.

    Args:
        target: the GPU.
        config: names the directories of the driver and of the mark.
        reason: the reason, for display.
        say: gets a line for each step.
    """

    def __init__(
        self, target: Target, config: Config, reason: str, say: Callable[[str], None]
    ) -> None:
        self._target = target
        self._config = config
        self._say = say
        gpu = target.gpu
        assert gpu is not None  # noqa: S101 - the caller checks it
        self._gpu = gpu
        mark = Drain(target.device, bus_id=gpu.bus_id, reset=DRAINING)
        marks.put(config, replace(mark, reason=reason or "reset"))

    def run(
        self,
        wait: Callable[[Callable[[], None]], Sequence[Holder]],
        look: Callable[[], Sequence[Holder]],
        inventory: Inventory,
    ) -> bool:
        """Reset the GPU.

        Args:
            wait: waits until there are no holders, and returns those that remain. It calls its
                argument when only the node agent and the processes it started still hold the GPU.
            look: returns the current holders.
            inventory: names the path of nvidia-smi.

        Returns:
            Whether the GPU is back in service; False if a person had taken it out before.

        Raises:
            StillHeld: the GPU has holders.
            ResetFailed: nvidia-smi did not reset it.
            ResetUnproven: NVML does not answer as expected.
            MarkUnwritten: the mark cannot be written.
        """
        try:
            while not self._reset(wait, look, inventory):
                self._step(DRAINING)  # a new holder appeared
            self._step(PROVING)
            self._prove()
        except (ResetFailed, ResetUnproven) as error:
            self._step(f"it failed: {one_line(error.found)}")
            raise
        except StillHeld:
            self._step(DRAINING)
            raise
        return marks.finish(self._config, self._target.device)

    def _step(self, step: str, *, closed: bool = False) -> None:
        marks.step(self._config, self._target.device, step, closed=closed)
        self._say(f"{self._target.name}: {step}")

    def _reset(
        self,
        wait: Callable[[Callable[[], None]], Sequence[Holder]],
        look: Callable[[], Sequence[Holder]],
        inventory: Inventory,
    ) -> bool:
        """Reset the GPU when it has no holders; False if one appeared before nvidia-smi started."""
        if holders := wait(partial(self._step, CLOSING, closed=True)):
            raise self._still_held([each.name for each in holders])

        def is_due() -> bool:
            if look():
                return False
            self._step(RESETTING, closed=True)
            return True

        arguments = ["--gpu-reset", "-i", self._gpu.bus_id]
        try:
            said = run_alone(inventory.driver, self._config, arguments, _TO_RESET, is_due=is_due)
        except NvmlInUse as error:
            if isinstance(error.__cause__, OSError):
                raise marks.unwritten(self._config, "to reset a GPU", error.__cause__) from error
            raise self._still_held(["a program of ours that queries NVML"]) from error
        except SmiFailed as error:
            asked = f"to reset {self._target.name}"
            raise ResetFailed(asked, found=error.found, do=error.do or _DO) from error
        return said is not None

    def _still_held(self, names: Sequence[str]) -> StillHeld:
        return StillHeld(
            f"to reset {self._target.name}",
            found=f"{', '.join(names)} still {'holds' if len(names) == 1 else 'hold'} it; it is "
            "out of service, and was not reset",
            do=f"run it again, with --force, or `nvshim undrain {self._target.words}`",
        )

    def _prove(self) -> None:
        deadline = time.monotonic() + _TO_PROVE
        while True:
            why = self._what_is_wrong()
            if not why:
                return
            if time.monotonic() > deadline:
                raise ResetUnproven(
                    f"{self._target.name} after its reset",
                    found=f"does not answer as it should: {why}",
                    do="see the kernel's log for Xid lines; reset it again, or reboot the node",
                )
            time.sleep(_PAUSE)

    def _what_is_wrong(self) -> str:
        config = self._config
        try:
            report = probe(config)
            inventory = engine.take_inventory(config, report)
        except NvshimError as error:
            return str(error)
        if inventory.nvml_failure:
            return inventory.nvml_failure
        gpu = next((each for each in inventory.gpus if each.bus_id == self._gpu.bus_id), None)
        if gpu is None:
            return f"there is no GPU at {self._gpu.bus_id}"
        if self._gpu.uuid and gpu.uuid != self._gpu.uuid:
            return f"there is another GPU at its address, {gpu.uuid or 'which has no UUID'}"
        return gpu.lost or inventory.nodes.faults.get(gpu.path, "")
