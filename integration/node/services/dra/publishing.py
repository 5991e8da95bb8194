"""Publish the node's ResourceSlices, and keep them up to date.

Rules
- The driver lists its slices, and then watches them. A kubelet that starts deletes every slice of
  its node at about the time when it registers the driver. So the watch decides when to publish.
- A watch that ends is resumed. If the server no longer knows the version (410), or a write was in
  conflict with another one (409, 404), everything is listed again. A missing list or Node is a
  fault.
- If the server finds slices invalid (a 422 that names fields), they are sent again after some
  minutes, or when they change. An admission policy or a webhook may deny a request with any status,
  even 422; this is retried like any refusal.
- If another client keeps changing the slices, the driver rewrites them a few times at once, because
  the client may be a kubelet that deletes them, and less often after that.
- A server may store less than it was sent. The driver remembers what it stored of each slice.
- Devices with taints are published if the server stores taints, and left out if not. A dry run
  finds this out first, because a device that lost its taint could be allocated in the meantime.
  Servers that do not know the effect None refuse such taints, so devices are published without them
  there.
- Devices that exclude each other by counters are published in the form that the server accepts: in
  slices of their own, next to the devices, or not at all, which is a fault. The driver tries these
  forms in turn for each version of the API.
- Only the answer to a write, or a field that the server finds invalid, shows what a server stores.
- The driver uses the newest version of the API that it and the server support.
- An answer that no API server would send may come from a proxy, and is treated as no answer. Each
  object is checked on arrival. A bug in this module is a fault. None of this ends the driver, since
  the kubelet keeps calling it.
- While the node's devices are unknown, the published slices stay.
- They also stay when the agent exits. If it does not come back, the kubelet deletes them.

Source: Kubernetes API concepts; kubelet pkg/kubelet/cm/dra/plugin (30 s without a connection).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final
from urllib.parse import quote

import anyio

from api.errors import describe_bug, type_name
from integration.agent_errors import (
    ApiServerRefused,
    ApiServerSilent,
    CountersMissing,
    DraFailed,
    SlicesRefused,
)
from integration.apiserver.client import ApiServer, Watch
from integration.backoff import Backoff
from integration.detached import run_detached
from integration.node.service import Context
from integration.node.services.dra.devices import INFORM, Device, Taint
from integration.node.services.dra.slices import (
    GROUP,
    VERSIONS,
    Counting,
    Owner,
    Write,
    changes,
    content_of,
    contents,
    key_of,
    lost_counters,
    with_times,
)

__all__ = ["Publisher", "claim_path", "class_path"]

_BAD_REQUEST, _NOT_FOUND, _CONFLICT, _GONE = 400, 404, 409, 410
_LIST_AGAIN: Final = frozenset({_NOT_FOUND, _CONFLICT, _GONE})
_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 300.0
# Seconds until slices that the server found invalid are sent again.
_WRONG_PAUSE: Final = 300.0
# How often the same content may be written within a window of seconds.
_WRITES: Final = 5
_WINDOW: Final = 30.0
_LEFT_OUT: Final = {False: "devices with taints are", True: "taints of the effect None are"}
_STRANGE: Final = (KeyError, TypeError, ValueError, AttributeError)


def claim_path(version: str, namespace: str, name: str) -> str:
    """Return the API path of a claim."""
    where = f"/apis/{GROUP}/{version}/namespaces/{quote(namespace, safe='')}"
    return f"{where}/resourceclaims/{quote(name, safe='')}"


def class_path(version: str, name: str) -> str:
    """Return the API path of a DeviceClass."""
    return f"/apis/{GROUP}/{version}/deviceclasses/{quote(name, safe='')}"


class _Uncounted(Exception):
    """The server dropped the counters that it was sent."""


class Publisher:
    """Publishes the node's devices.

    Args:
        before: called with the API path of slices before any slice is written.
    """

    def __init__(
        self,
        context: Context,
        api: ApiServer,
        driver: str,
        node: str,
        fault: Callable[[str, str], None],
        *,
        before: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._say = context.say
        self._api = api
        self._driver = driver
        self._node = node
        self._fault = fault
        self._before = before
        self._version = ""
        self._wanted: tuple[Device, ...] | None = None
        self._there: dict[str, dict[str, Any]] = {}
        # Names are never reused. A slice may be deleted before the answer to its write arrives.
        self._gone: set[str] = set()
        self._kept: dict[str, Any] = {}
        self._refused: tuple[tuple[Device, ...], float] = (), 0.0
        self._written: tuple[Device, ...] | None = None
        self._rewritten: deque[float] = deque(maxlen=_WRITES)
        # Whether the server keeps taints, with the effect None (True) and with the others.
        self._tainting: dict[bool, bool] = {}
        self._counting, self._uncounted = Counting.APART, ""
        self._owner = Owner(driver, node, "")
        self._wake = anyio.Event()

    def want(self, devices: tuple[Device, ...] | None) -> None:
        """Set the devices to publish; None while they are unknown."""
        if devices != self._wanted:
            self._wanted = devices
            self._news()

    async def version(self) -> str:
        """Return the version of the API to use.

        Raises:
            ApiServerSilent: the server does not answer.
            ApiServerRefused: the server refuses; 404 if it does not have the API.
        """
        if not self._version:
            group = await self._call("GET", f"/apis/{GROUP}")
            with _understood("the versions of the API"):
                has = {str(each["version"]) for each in group.get("versions") or ()}
            usable = [each for each in VERSIONS if each in has]
            if not usable:
                raise ApiServerRefused(
                    f"to use {GROUP} of the API server",
                    found=f"it has {', '.join(sorted(has)) or 'no version'}",
                    do=f"enable one of {', '.join(VERSIONS)}",
                )
            self._version = usable[0]
            self._counting = Counting.APART
        return self._version

    async def run(self) -> None:
        """Publish until cancelled."""
        backoff = Backoff()
        while True:
            begun = time.monotonic()
            try:
                await self._keep()
                pause = backoff.pause(time.monotonic() - begun)
                pause = min(pause, _PAUSE) if self._there else pause
            except (ApiServerRefused, ApiServerSilent) as error:
                self._fault("slices", str(error))
                self._version, self._tainting = "", {}  # the next server may be another one
                pause = backoff.pause(time.monotonic() - begun)
                if isinstance(error, ApiServerRefused):
                    pause = max(pause, min(error.retry_after, _LONGEST_PAUSE))
            except Exception as error:  # noqa: BLE001 - a bug here must not end the driver
                found = f"{type_name(error)}: {error}"
                self._fault("slices", str(DraFailed("to publish the devices", found=found)))
                self._say("error", "publishing failed", bug=describe_bug(error))
                pause = backoff.pause(time.monotonic() - begun)
            await anyio.sleep(pause)

    async def _keep(self) -> None:
        """List, watch and write slices, until they have to be listed again."""
        version = await self.version()
        path = f"/apis/{GROUP}/{version}/resourceslices"
        if self._before is not None:
            await self._before(path)
        self._owner = Owner(self._driver, self._node, await self._node_uid(), version)
        ours = {"fieldSelector": f"spec.driver={self._driver},spec.nodeName={self._node}"}
        found = await self._call("GET", path, query=ours)
        with _understood("the list of slices"):
            self._there = {_name_of(each): each for each in found.get("items") or ()}
            since = str(found["metadata"]["resourceVersion"])
        self._gone = set()
        failed: list[Exception] = []
        async with anyio.create_task_group() as tasks:

            async def attempt(do: Callable[[], Any]) -> None:
                try:
                    await do()
                except Exception as error:  # noqa: BLE001 - it is raised below
                    failed.append(error)
                tasks.cancel_scope.cancel()

            tasks.start_soon(attempt, partial(self._watch, path, since, ours))
            tasks.start_soon(attempt, partial(self._write, path))
        if failed and not _is_outdated(failed[0]):
            raise failed[0]

    async def _watch(self, path: str, since: str, query: dict[str, str]) -> None:
        """Follow changes of the driver's slices, until the server cannot resume the watch."""
        started = -math.inf
        while True:
            # A pause, for servers that end each watch at once.
            await anyio.sleep(max(0.0, started + _PAUSE - time.monotonic()))
            started = time.monotonic()
            start = partial(self._api.watch, path, since, query)
            watch = await run_detached(start, drop=lambda watch: watch.close())
            try:
                while (change := await _next(watch)) is not None:
                    kind, found = change
                    with _understood("a change of a slice"):
                        since = str(found["metadata"]["resourceVersion"])
                    self._hear(kind, found)
            finally:
                watch.close()

    def _hear(self, kind: str, found: dict[str, Any]) -> None:
        if kind == "BOOKMARK":
            return
        with _understood("a change of a slice"):
            name = _name_of(found)
        if kind == "DELETED":
            self._there.pop(name, None)
            self._gone.add(name)
        else:
            self._keep_newest(name, found)
        self._news()

    def _keep_newest(self, name: str, found: dict[str, Any]) -> None:
        """Remember a slice, unless a later version is known: by the watch, or by a write."""
        known = self._there.get(name)
        if known is None or _number(found) >= _number(known):
            self._there[name] = found

    async def _write(self, path: str) -> None:
        """Publish whenever the wanted devices or the slices change."""
        while True:
            wake = self._wake = anyio.Event()
            wanted = self._wanted
            if wanted is not None:
                pause = self._refused_for(wanted) or await self._publish(path, wanted)
                if pause is None:
                    continue
                if pause:
                    with anyio.move_on_after(pause):
                        while self._wanted == wanted:
                            await self._wake.wait()
                            self._wake = anyio.Event()
                    continue
            await wake.wait()

    def _refused_for(self, wanted: tuple[Device, ...]) -> float:
        """Return the seconds until devices that the server found invalid are sent again."""
        refused, until = self._refused
        return max(0.0, until - time.monotonic()) if wanted == refused else 0.0

    async def _publish(self, path: str, wanted: tuple[Device, ...]) -> float | None:
        """Publish the devices.

        Returns:
            Seconds to wait before the next try; 0 if it is done; None if it must start over.
        """
        try:
            pause = await self._write_due(path, wanted)
        except _Uncounted:
            self._count(Counting.NONE, "it does not keep them")
            return None
        except ApiServerRefused as error:
            if not error.invalid:
                raise
            if self._counting is not Counting.NONE and error.is_about("counter"):
                self._count(self._counting.next, error.found)
                return None
            if self._tainting.get(True) and error.is_about("taint"):
                self._tainting[True] = False  # another server answered the dry run
                return None
            self._refused = wanted, time.monotonic() + _WRONG_PAUSE
            said = SlicesRefused("to publish the node's devices", found=error.found)
            self._fault("slices", str(said))
            return _WRONG_PAUSE
        if not pause:
            self._refused, self._written = ((), 0.0), wanted
            self._fault("slices", "")
            self._fault("counters", self._left_out(wanted))
        return pause

    async def _write_due(self, path: str, wanted: tuple[Device, ...]) -> float:
        """Write all slices that differ; return the seconds to wait before that, or 0."""
        published = wanted
        if not await self._keeps_taints(path, wanted, inform=True):
            published = tuple(replace(each, taints=_taints(each)) for each in wanted)
        if not await self._keeps_taints(path, wanted):
            published = tuple(each for each in published if not _taints(each))
        there = self._there.values()
        found = contents(published, self._owner.version, self._counting)
        lists = [with_times(content, there) for content in found]
        self._kept = {key: self._kept[key] for key in map(key_of, lists) if key in self._kept}
        due = changes(there, lists, self._owner, kept=self._kept)
        if due and (pause := self._pause(wanted)):
            self._say("warning", "another client keeps changing the node's slices", again_in=pause)
            return pause
        if any(write.method == "POST" for write in due):
            # The slices may be gone because their Node was deleted and created again.
            self._owner = replace(self._owner, node_uid=await self._node_uid())
            due = changes(there, lists, self._owner, kept=self._kept)
        for write in due:
            await self._make(path, write)
        if due:
            self._say("info", "published", devices=len(wanted), writes=len(due))
        return 0.0

    def _count(self, counting: Counting, why: str) -> None:
        """Publish counters in another place from now on."""
        self._counting, self._uncounted = counting, why
        self._say("warning", "the API server takes no counters here", now=counting.value, why=why)

    def _left_out(self, wanted: Iterable[Device]) -> str:
        """Return why MIG devices to create are not published; "" if they are."""
        if self._counting is not Counting.NONE or all(each.part is None for each in wanted):
            return ""
        found = f"{self._uncounted} (it serves {GROUP}/{self._owner.version})"
        return str(CountersMissing("to publish the possible MIG devices", found=found))

    def _pause(self, wanted: tuple[Device, ...]) -> float:
        """Return the seconds until the same content may be written again."""
        now = time.monotonic()
        if wanted != self._written:
            self._rewritten.clear()
        elif len(self._rewritten) == _WRITES and now - self._rewritten[0] < _WINDOW:
            return self._rewritten[0] + _WINDOW - now
        else:
            self._rewritten.append(now)
        return 0.0

    async def _keeps_taints(
        self, path: str, wanted: Iterable[Device], *, inform: bool = False
    ) -> bool:
        """Return whether the server stores taints; a dry run finds out.

        Args:
            inform: whether to test taints with the effect None, or all others.
        """
        one = next((each for each in wanted if _taints(each, inform=inform)), None)
        if one is None:
            return True
        if inform not in self._tainting:
            # A server without counters would refuse a MIG device to create.
            whole = replace(one, counters=None, part=None, taints=_taints(one, inform=inform))
            (create,) = changes((), contents((whole,), self._owner.version), self._owner)
            try:
                found = await self._call("POST", path, create.body, {"dryRun": "All"})
            except ApiServerRefused as error:
                if error.http == _BAD_REQUEST and error.denied_by:
                    # A webhook that refuses dry runs does not tell whether the server keeps taints.
                    self._say("warning", f"{_LEFT_OUT[inform]} left out", why=str(error))
                    return False
                if not error.is_about("taint"):
                    raise
                self._tainting[inform] = False
            else:
                with _understood("a slice that was tried"):
                    (device,) = found["spec"]["devices"]
                    self._tainting[inform] = bool(device.get("basic", device).get("taints"))
            if not self._tainting[inform]:
                self._say("warning", f"the API server keeps none: {_LEFT_OUT[inform]} left out")
        return self._tainting[inform]

    async def _node_uid(self) -> str:
        node = await self._call("GET", f"/api/v1/nodes/{quote(self._node, safe='')}")
        with _understood("the Node"):
            return str(node["metadata"]["uid"])

    async def _make(self, path: str, write: Write) -> None:
        """Do a write, and remember what the server stored."""
        where = f"{path}/{quote(write.name, safe='')}" if write.name else path
        found = await self._call(write.method, where, write.body)
        if write.method == "DELETE":
            self._there.pop(write.name, None)
            return
        with _understood("a slice that was written"):
            name, has = _name_of(found), content_of(found["spec"])
        if name not in self._gone:
            self._keep_newest(name, found)
        sent = with_times(content_of(write.body["spec"]), (found,))
        if lost_counters(sent, has):
            raise _Uncounted
        if has != sent and self._kept.get(key_of(sent)) != has:
            self._kept[key_of(sent)] = has
            self._say("warning", "the API server stored only a part of the devices")

    async def _call(
        self, method: str, path: str, body: Any = None, query: dict[str, str] | None = None
    ) -> dict[str, Any]:
        call = partial(self._api.call, method, path, body, query)
        return await run_detached(call)

    def _news(self) -> None:
        self._wake.set()


def _taints(device: Device, *, inform: bool = False) -> tuple[Taint, ...]:
    """Return the taints of a device with the effect None, or all others."""
    return tuple(each for each in device.taints if (each.effect == INFORM) is inform)


async def _next(watch: Watch) -> tuple[str, dict[str, Any]] | None:
    """Return the next change; cancelling this also ends the thread that reads."""
    try:
        return await run_detached(watch.next)
    except BaseException:
        watch.close()
        raise


@contextmanager
def _understood(what: str) -> Iterator[None]:
    """Raise ApiServerSilent if the block fails on an answer that no API server sends."""
    try:
        yield
    except _STRANGE as error:
        raise ApiServerSilent(
            f"to read {what}",
            found=f"not what an API server answers ({type(error).__name__}: {error})",
            do="check what answers at --api-server",
        ) from error


def _name_of(found: dict[str, Any]) -> str:
    """Return the name of a slice, after checking all fields that are read later."""
    metadata, spec = found["metadata"], found["spec"]
    pool = spec["pool"]
    if not all(isinstance(pool[key], int) for key in ("generation", "resourceSliceCount")):
        raise TypeError("a pool without numbers")
    _ = pool["name"], [each.get("uid") for each in metadata.get("ownerReferences") or ()]
    for device in spec.get("devices") or ():
        for taint in device.get("basic", device).get("taints") or ():
            _ = device["name"], taint["key"], taint["effect"]
    return str(metadata["name"])


def _is_outdated(error: Exception) -> bool:
    """Return whether an error only means that the slices must be listed again."""
    is_answer = isinstance(error, ApiServerRefused) and error.http in _LIST_AGAIN
    return is_answer and not getattr(error, "denied_by", "")


def _number(found: dict[str, Any]) -> float:
    """Return a resource version as a number; infinity if it is not one."""
    version = str(found["metadata"].get("resourceVersion"))
    return int(version) if version.isdecimal() else math.inf
