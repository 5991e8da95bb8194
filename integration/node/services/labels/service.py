"""Keep the labels of the node up to date.

Rules
- The service runs only with ``--node-labels``. It writes when the inventory, the device plugin's
  settings or the NVLink cliques have changed, and when the agent gets SIGHUP. Every ten minutes it
  compares: another program may have removed labels, or the Node was registered again.
- While a GPU is lost, or NVML or the driver does not answer, the labels stay as they are. They are
  removed when the node's last GPU is removed.
- NVML is asked only if the GPUs or MIG devices have changed, and not while it is paused.
- When the agent stops, the labels stay, unless ``--node-labels-remove`` is set.
"""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Any, Final

import anyio

from api.errors import NvshimError
from hooks.config import Config
from hooks.errors import NvmlFailed
from hooks.node.inventory import Inventory
from integration.apiserver.client import ApiServer
from integration.detached import run_detached
from integration.node.reporter import api_server_of, keep_reported
from integration.node.service import Context, settings_of
from integration.node.services.labels.decision import NodeLabels, labels_of
from integration.node.services.labels.host import look_at_host
from integration.node.services.labels.writers import WRITERS
from integration.node.values.resources import Mig, Settings
from integration.nvml.fabric import fabrics_of
from integration.nvml.mig_parts import Parts, ask_parts
from integration.nvml.nvidia_smi import SmiFailed

# Seconds that the removal of labels may delay the agent's exit; a kubelet waits for 15.
_REMOVAL: Final = 10.0


async def run(context: Context) -> None:
    """Keep the labels up to date until cancelled."""
    labeller, state = Labeller(context), context.state
    try:
        await keep_reported(
            context,
            labeller.write,
            *state.nvml_inputs,
            state.settings,
            state.reloads,
            state.cliques,
            forget=labeller.forget,
        )
    except anyio.get_cancelled_exc_class():
        if context.options.node_labels_remove:
            with anyio.move_on_after(_REMOVAL, shield=True):
                await run_detached(labeller.remove)
        raise


class Labeller:
    """Decides and writes, in threads."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._write = WRITERS[context.options.node_labels]
        self._writing = threading.Lock()
        self._is_removed = False
        self._done: Any = None  # what was written last, and the reloads until then
        self._settled: tuple[frozenset[str], NodeLabels] | None = None
        self._mig: tuple[Any, Parts] | None = None

    def write(self, api: ApiServer) -> None:
        """Write the labels, unless nothing has changed or they cannot be known now.

        Raises:
            NvshimError: from NVML, from the device plugin's settings, or from the writer of the
                labels.
        """
        state, settings = self._context.state, settings_of(self._context)
        if settings is None or state.nvml_unavailable:
            return
        reloads = state.reloads.value
        wanted = self._wanted(state.node.value.inventory, settings)
        if wanted is not None and self._done != (wanted, reloads):
            with self._writing:
                if not self._is_removed:  # a cancelled thread goes on
                    self._write(api, self._context.options, wanted)
            self._done = wanted, reloads

    def forget(self) -> None:
        """Compare with the existing labels again at the next :meth:`write`."""
        self._done = None

    def remove(self) -> None:
        """Remove the labels for good. An error is logged."""
        options = self._context.options
        try:
            with self._writing, closing(api_server_of(options)) as api:
                self._is_removed = True
                self._write(api, options, NodeLabels())
        except NvshimError as error:
            self._context.say("warning", str(error))

    def _wanted(self, inventory: Inventory | None, settings: Settings) -> NodeLabels | None:
        """Return the labels; None to leave them as they are."""
        host = look_at_host(self._context.config, self._context.options.machine_type_file)
        if inventory is None:  # the driver is gone; are the GPUs?
            return None if host.classes else NodeLabels()
        if inventory.nvml_failure:
            return None
        there = frozenset(gpu.bus_id for gpu in inventory.gpus)
        is_lost = any(gpu.lost for gpu in inventory.gpus)
        if is_lost and self._settled is not None and self._settled[0] == there:
            return self._settled[1]
        if is_lost and all(gpu.lost or gpu.excluded for gpu in inventory.gpus):
            return None  # what an earlier agent wrote is right
        mig, clique = self._parts(inventory, settings), self._clique(inventory)
        labels = labels_of(inventory, settings, mig, host, clique)
        self._settled = there, labels
        return labels

    def _clique(self, inventory: Inventory) -> str | None:
        """Return the NVLink clique of the GPUs; None if they are in none, or in several."""
        known = self._context.state.cliques.value
        if known is None:  # the monitor has not sampled NVML yet
            places = fabrics_of(self._context.config, inventory).values()
            known = frozenset(place.name for place in places if place.name)
        return next(iter(known)) if len(known) == 1 else None

    def _parts(self, inventory: Inventory, settings: Settings) -> Parts:
        gpus = tuple((gpu.uuid, gpu.lost) for gpu in inventory.gpus)
        devices: tuple[str, ...] = ()
        if settings.mig_strategy is not Mig.NONE:
            devices = tuple(each.uuid for each in inventory.mig_devices)
        seen = inventory.driver.version, gpus, devices
        if self._mig is None or self._mig[0] != seen:
            self._mig = seen, _ask(self._context.config, inventory) if gpus else Parts()
        return self._mig[1]


def _ask(config: Config, inventory: Inventory) -> Parts:
    """Ask NVML which GPUs support MIG, and which resources each MIG device has.

    Raises:
        NvmlFailed: NVML does not answer, or leaves out a GPU that is not lost.
    """
    try:
        parts = ask_parts(config)
        if out := parts.left_out(inventory.gpus):
            raise SmiFailed(f"its answer lacks {out}")  # noqa: TRY301 - handled as no answer
    except SmiFailed as error:
        raise NvmlFailed(
            "NVML's answer about MIG, for the node's labels",
            found=error.found,
            do="check that nvidia-smi works on the node; the agent retries",
        ) from error
    return parts
