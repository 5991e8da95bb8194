"""The slices that an agent of this node published by another driver name.

Rules
- The kubelet deletes them 30 seconds after the driver of that name has gone. Until then the
  scheduler knows each GPU twice, so they are deleted before ours are written.
- Names are written down before anything is published, for this boot: a kubelet that starts deletes
  every slice of its node.
- Somebody else's driver may have the name by now. Its slices have no device with the attributes
  that only ours have, and stay; so does an empty slice, which offers nothing.
- What the agent may not delete (an admission policy that names drivers) is left to the kubelet.

Source: Kubernetes kubelet pkg/kubelet/cm/dra/plugin (30 s without a connection).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import anyio.to_thread

from integration.agent_errors import ApiServerRefused, DraStateUnwritten
from integration.apiserver.status import is_away
from integration.detached import run_detached
from integration.node.services.dra.slices import deletion, is_ours
from integration.node.state import claims_file as state

if TYPE_CHECKING:
    from integration.apiserver.client import ApiServer
    from integration.node.service import Context

__all__ = ["FormerSlices"]

_NOT_FOUND: Final = 404


class FormerSlices:
    """Deletes them.

    Args:
        driver: the name that the driver has now.
        node: the Node's name.
    """

    def __init__(self, context: Context, api: ApiServer, driver: str, node: str) -> None:
        self._context = context
        self._api = api
        self._driver = driver
        self._node = node
        self._names: tuple[str, ...] = ()

    async def begin(self) -> None:
        """Read by which names agents have published, and write down the present one."""
        known = await anyio.to_thread.run_sync(state.drivers, self._context.config)
        self._names = tuple(name for name in known if name != self._driver)
        await self._save((*self._names, self._driver))

    async def remove(self, path: str) -> None:
        """Delete them; nothing if there are none.

        Args:
            path: where the API server has slices.

        Raises:
            ApiServerSilent: the server does not answer.
            ApiServerRefused: it is busy, or fails.
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
        """Delete what was published by a name; returns how many slices."""
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
        try:
            await anyio.to_thread.run_sync(state.save_drivers, self._context.config, names)
        except DraStateUnwritten as error:  # the kubelet deletes what nobody knows of
            self._context.say("warning", str(error))
