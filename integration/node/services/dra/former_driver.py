"""Delete the slices that an agent of this node published under another driver name.

Rules
- The kubelet deletes them 30 seconds after the driver of that name has disconnected. Until then the
  scheduler would see each GPU twice, so they are deleted before new slices are written.
- Driver names are recorded before anything is published. The record is valid until a reboot,
  because a kubelet that starts deletes all slices of its node.
- Another vendor's driver may now use the name. Its slices stay, since they lack the attributes that
  only this driver publishes. An empty slice stays, too, because it offers nothing.
- If the agent may not delete a slice (an admission policy that names drivers), the kubelet will.

Source: Kubernetes kubelet pkg/kubelet/cm/dra/plugin (30 s without a connection).
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final
from urllib.parse import quote

from integration.agent_errors import ApiServerRefused, DraStateUnwritten, FilesSilent
from integration.apiserver.client import ApiServer
from integration.apiserver.status import is_away
from integration.detached import run_detached
from integration.node.service import Context
from integration.node.services.dra.slices import deletion, is_ours
from integration.node.state import claims_file as state

__all__ = ["FormerSlices"]

_NOT_FOUND: Final = 404


class FormerSlices:
    """Deletes the slices of earlier driver names.

    Args:
        driver: the driver's present name.
        node: the name of the Node.
    """

    def __init__(self, context: Context, api: ApiServer, driver: str, node: str) -> None:
        self._context = context
        self._api = api
        self._driver = driver
        self._node = node
        self._names: tuple[str, ...] = ()

    async def start(self) -> None:
        """Read under which names agents published, and record the present one.

        Raises:
            FilesSilent: the file system does not answer.
        """
        config, asked = self._context.config, "to read the names of former drivers"
        known = await self._context.files.run(config.state, asked, state.drivers, config)
        self._names = tuple(name for name in known if name != self._driver)
        await self._save((*self._names, self._driver))

    async def remove(self, path: str) -> None:
        """Delete the slices, if there are any.

        Args:
            path: the API path of ResourceSlices.

        Raises:
            ApiServerSilent: the server does not answer.
            ApiServerRefused: the server is busy or has failed.
        """
        for name in self._names:
            try:
                deleted = await self._remove(path, name)
            except ApiServerRefused as error:
                if is_away(error):
                    raise
                self._context.say("warning", str(error), left_to="the kubelet", driver=name)
            else:
                self._context.say("info", "deleted former slices", driver=name, slices=deleted)
            self._names = tuple(each for each in self._names if each != name)
            await self._save((*self._names, self._driver))

    async def _remove(self, path: str, driver: str) -> int:
        """Delete the slices of a driver name; return how many."""
        query = {"fieldSelector": f"spec.driver={driver},spec.nodeName={self._node}"}
        found = await run_detached(partial(self._api.call, "GET", path, query=query))
        items = found.get("items")
        slices: list[dict[str, Any]] = items if isinstance(items, list) else []
        if not any(map(is_ours, slices)):
            return 0
        for each in slices:
            write = deletion(each)
            where = f"{path}/{quote(write.name, safe='')}"
            try:
                await run_detached(partial(self._api.call, write.method, where, write.body))
            except ApiServerRefused as error:
                if error.http != _NOT_FOUND or error.denied_by:  # the kubelet was faster
                    raise
        return len(slices)

    async def _save(self, names: tuple[str, ...]) -> None:
        config, asked, save = self._context.config, "to write the driver's name", state.save_drivers
        try:
            await self._context.files.run(config.state, asked, save, config, names)
        except (DraStateUnwritten, FilesSilent) as error:  # then the kubelet deletes the slices
            self._context.say("warning", str(error))
