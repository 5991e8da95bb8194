"""A place where shims are started for one containerd after the other, and its fork server."""

from __future__ import annotations

import glob
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from api.ttrpc.client import connect
from shim.verbs.warmstart import LOCK_FD, link_name
from tests.harness.processes import sockets_of
from tests.harness.runtime import is_alive
from tests.harness.shim import ShimByHand
from tests.harness.waiting import eventually, settled

# Of /proc/net/unix: __SO_ACCEPTCON.
_LISTENS: Final = "00010000"


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
            self.wait_for_spares()
        return int(pid)

    def wait_for_spares(self) -> list[int]:
        """Wait until the only fork server sleeps, with its spares made; returns their pids."""

        def look() -> list[int]:
            servers, spares = self.servers(), self.spares()
            ready = len(servers) == 1 and len(spares) == 2 and _state(servers[0]) == "S"
            return spares if ready and self.server_listens() else []

        return eventually(look, "a fork server with its spares waits")

    def servers(self) -> list[int]:
        """The pids of the fork servers of this node."""
        # A process that one has forked has its command line at first, but does not lead a group
        # before it has closed the lock.
        return [
            pid
            for pid in self._family()
            if words_of(pid)[-1:] == ["fork-server"]
            and "-spare" not in words_of(pid)
            and _leads_group(pid)
            and _file(pid, LOCK_FD).partition(" ")[0].endswith(".lock")
        ]

    def spares(self) -> list[int]:
        """The pids of what the fork servers have forked, and waits for a verb or to be a shim."""
        # One that does a verb has its caller's standard input, and in the end none.
        return [
            pid
            for pid in self._family()
            if "-spare" in words_of(pid) and _file(pid, 0) == os.devnull
        ]

    def server_socket(self) -> str:
        """Where a fork server of this node listens; empty if nowhere."""
        found = next(filter(None, map(socket_of_server, self.servers())), "")
        self.server_sockets.update({found} - {""})
        return found

    def server_link(self) -> str:
        """By what the launcher finds where the fork server listens; empty if that is nowhere."""
        path = self.server_socket()
        link = link_name(self.address, f"{self.launcher}.py")
        return path and os.path.join(os.path.dirname(path), link)

    def server_listens(self) -> bool:
        """Whether the launcher would find a fork server. It is not asked: that takes a spare."""
        return os.path.exists(self.server_link())

    def no_verb_is_done(self) -> bool:
        """Whether each verb has ended, and what it has forked is what it was to become."""
        return not any(words_of(pid)[-1:] in (["start"], ["delete"]) for pid in self._family())

    def _family(self) -> list[int]:
        """All processes that have this node's address for an argument."""
        return [pid for pid in pids() if self.address in words_of(pid)]

    def close(self) -> None:
        told: set[int] = set()
        seen = [True, True]

        def ended() -> bool:
            # Looked for again each time: a spare, or a fork server, may just be on its way into
            # the world. Twice, since one that forks and ends while it is looked for is seen by
            # neither of its names.
            living = {pid for pid in (*self._family(), *self.pids) if is_alive(pid)}
            for pid in living - told:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                    os.kill(pid, signal.SIGTERM)
            told.update(living)
            seen[:] = [*seen[1:], bool(living)]
            return not any(seen)

        settled(ended, expected=True)
        self.shims.clean()
        for socket_path in self.sockets:
            for path in (socket_path, *glob.glob(f"{socket_path}.*")):
                with suppress(FileNotFoundError):
                    os.unlink(path)


def socket_of_server(pid: int) -> str:
    """Where a fork server listens; empty if nowhere, or not yet."""
    with open("/proc/net/unix") as file:
        lines = [words for line in file if len(words := line.split()) == 8]
    paths = {words[6]: words[7] for words in lines if words[3] == _LISTENS}
    for inode in sockets_of(pid):
        # Before it listens it rehearses, on a socket that has its pid in its name.
        if inode in paths and not paths[inode].rpartition(".")[2].isdigit():
            return paths[inode]
    return ""


def pids() -> list[int]:
    """Those of all processes of the machine."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _state(pid: int) -> str:
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
    return ""


def _leads_group(pid: int) -> bool:
    with suppress(ProcessLookupError):
        return os.getpgid(pid) == pid
    return False


def _file(pid: int, descriptor: int) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/fd/{descriptor}")
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
