"""A place where shims are started for one containerd after the other, and its fork server."""

from __future__ import annotations

import glob
import os
import signal
import socket
import tempfile
import time
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from api.ttrpc.client import connect
from tests.harness.processes import sockets_of
from tests.harness.runtime import is_alive
from tests.harness.shim import ShimByHand
from tests.harness.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Node:
    """A containerd's place on a machine: shims are started for it one after the other."""

    def __init__(self, launcher: str) -> None:
        self.launcher = launcher
        self.shims = ShimByHand(tempfile.mkdtemp(prefix="nvshim-"), launcher, bootstrap=False)
        self.shims.environment = {}
        self.address = os.path.join(self.shims.directory, "c.sock")
        self.server_sockets: set[str] = set()
        self.sockets: list[str] = []
        self.pids: list[int] = []

    async def start(self, name: str, *, wait: bool = True) -> int:
        """Start a shim; returns its pid. Waits for the fork server, if one is left behind."""
        self.shims.bundle(name, "sleep", "1000")
        path = self.shims.start_verb(name).removeprefix("unix://")
        self.sockets.append(path)
        async with connect(path) as self.shims.client:
            pid = (await self.shims.call("Connect", id=name)).shim_pid
        self.pids.append(pid)
        if wait:
            eventually(self.server_listens, "a fork server listens")
        return int(pid)

    def servers(self) -> list[int]:
        """The pids of the fork servers of this node."""
        # A process that one has just forked looks like it for a moment.
        deadline = time.monotonic() + 0.5
        while len(found := self._named_so(spare=False)) > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        return found

    def spares(self) -> list[int]:
        """The pids of what the fork servers have forked and is no shim yet."""
        return self._named_so(spare=True)

    def _named_so(self, *, spare: bool) -> list[int]:
        found = []
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            words = words_of(int(pid))
            ours = words[-1:] == ["fork-server"] and self.address in words
            if ours and ("-spare" in words) == spare:
                found.append(int(pid))
        return found

    def server_socket(self) -> str:
        """Where a fork server of this node listens; empty if nowhere."""
        found = next(filter(None, map(socket_of_server, self.servers())), "")
        self.server_sockets.update({found} - {""})
        return found

    def server_listens(self) -> bool:
        path = self.server_socket()
        with socket.socket(socket.AF_UNIX) as probe:
            return bool(path) and probe.connect_ex(path) == 0

    def _everybody(self) -> list[int]:
        # Asked again each time: a spare may just be on its way into the world.
        return [*self._named_so(spare=False), *self._named_so(spare=True), *self.pids]

    def close(self) -> None:
        for pid in self._everybody():
            if is_alive(pid):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 10
        while any(map(is_alive, self._everybody())) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.shims.clean()
        for socket_path in self.sockets:
            for path in (socket_path, *glob.glob(f"{socket_path}.*")):
                with suppress(FileNotFoundError):
                    os.unlink(path)


def socket_of_server(pid: int) -> str:
    """Where a fork server listens; empty if nowhere, or not yet."""
    with open("/proc/net/unix") as file:
        paths = {words[6]: words[7] for line in file if len(words := line.split()) == 8}
    for inode in sockets_of(pid):
        # Before it listens it rehearses, on a socket that has its pid in its name; and what it
        # forks for that has the socket and the command line, too.
        if inode in paths and not paths[inode].rpartition(".")[2].isdigit():
            return paths[inode]
    return ""


def words_of(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return [word for word in file.read().split("\0") if word]
    except OSError:
        return []


@asynccontextmanager
async def node_of(launcher: str) -> AsyncIterator[Node]:
    """A node; all of it is removed at the end, and nothing may be left of its fork servers."""
    node = Node(launcher)
    try:
        yield node
    finally:
        node.close()
    assert [pid for pid in (*node.servers(), *node.spares()) if is_alive(pid)] == []
    left = [p for own in node.server_sockets for p in (own, f"{own}.lock") if os.path.exists(p)]
    assert left == [], left
