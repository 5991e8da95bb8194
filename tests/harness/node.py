"""An environment in which shims of several containerds start in turn, with its fork server."""

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

# In /proc/net/unix: __SO_ACCEPTCON.
_LISTENS: Final = "00010000"


class Node:
    """The directory and address of a containerd for which shims start one after the other."""

    def __init__(self, launcher: str) -> None:
        self.launcher = launcher
        self.shims = ShimByHand(tempfile.mkdtemp(prefix="nvshim-"), launcher, bootstrap=False)
        self.shims.environment = {}
        self.address = os.path.join(self.shims.directory, "c.sock")
        self.server_sockets: set[str] = set()
        self.sockets: list[str] = []
        self.pids: list[int] = []

    async def start(self, name: str, *, wait: bool = True) -> int:
        """Start a shim and return its pid. Wait for the fork server that it leaves, if any."""
        self.shims.bundle(name, "sleep", "1000")
        path = self.shims.start_verb(name).removeprefix("unix://")
        self.sockets.append(path)
        async with connect(path) as self.shims.client:
            pid = (await self.shims.call("Connect", id=name)).shim_pid
        self.pids.append(pid)
        if wait:
            self.wait_for_spares()
        return int(pid)

    def wait_for_spares(self, *, given_back: int = 0) -> list[int]:
        """Wait until the only fork server is idle and has forked its spares; return their pids.

        Args:
            given_back: how many more there may be: those of verbs that needed no new shim, and took
                so long that the fork server had already forked others.
        """

        def look() -> list[int]:
            servers, spares = self.servers(), self.spares()
            is_full = 2 <= len(spares) <= 2 + given_back
            ready = len(servers) == 1 and is_full and _state(servers[0]) == "S"
            return spares if ready and self.server_listens() else []

        return eventually(look, "a fork server with its spares waits")

    def servers(self) -> list[int]:
        """Return the pids of the fork servers of this node."""
        # A forked child has the server's command line at first, but becomes a group leader only
        # after it has closed the lock.
        return [
            pid
            for pid in self._family()
            if words_of(pid)[-1:] == ["fork-server"]
            and "-spare" not in words_of(pid)
            and _leads_group(pid)
            and _file(pid, LOCK_FD).partition(" ")[0].endswith(".lock")
        ]

    def spares(self) -> list[int]:
        """Return the pids of the spares: forked processes that wait for a verb or shim to run."""
        # A process that runs a verb has its caller's standard input, and closes it at the end.
        return [
            pid
            for pid in self._family()
            if "-spare" in words_of(pid) and _file(pid, 0) == os.devnull
        ]

    def server_socket(self) -> str:
        """Return the socket of this node's fork server; empty if none listens."""
        found = next(filter(None, map(socket_of_server, self.servers())), "")
        self.server_sockets.update({found} - {""})
        return found

    def server_link(self) -> str:
        """Return the link by which the launcher finds the fork server's socket; empty if none."""
        path = self.server_socket()
        link = link_name(self.address, f"{self.launcher}.py")
        return path and os.path.join(os.path.dirname(path), link)

    def server_listens(self) -> bool:
        """Return whether the launcher would find a fork server; does not use up a spare."""
        return os.path.exists(self.server_link())

    def no_verb_is_done(self) -> bool:
        """Return whether every verb has exited, and its children have their final command lines."""
        return not any(words_of(pid)[-1:] in (["start"], ["delete"]) for pid in self._family())

    def _family(self) -> list[int]:
        """Return all processes that have this node's address as an argument."""
        return [pid for pid in pids() if self.address in words_of(pid)]

    def close(self) -> None:
        told: set[int] = set()
        seen = [True, True]

        def ended() -> bool:
            # Each pass searches again: a spare or a fork server may be starting. Two passes have to
            # find none, because one misses a process that forks and exits meanwhile.
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
    """Return the socket of a fork server; empty if it does not listen, or not yet."""
    with open("/proc/net/unix") as file:
        lines = [words for line in file if len(words := line.split()) == 8]
    paths = {words[6]: words[7] for words in lines if words[3] == _LISTENS}
    for inode in sockets_of(pid):
        # Before it listens it warms up on a socket that has its pid in its name.
        if inode in paths and not paths[inode].rpartition(".")[2].isdigit():
            return paths[inode]
    return ""


def pids() -> list[int]:
    """Return the pids of all processes of the machine."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _state(pid: int) -> str:
    with (
        suppress(OSError),
        open(f"/proc/{pid}/stat", encoding="utf-8", errors="surrogateescape") as file,
    ):
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
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="surrogateescape") as file:
            return [word for word in file.read().split("\0") if word]
    except OSError:
        return []


@asynccontextmanager
async def node_of(launcher: str) -> AsyncIterator[Node]:
    """Make a node and remove it at the end; fail if anything of its fork servers is left."""
    node = Node(launcher)
    try:
        yield node
    finally:
        node.close()
    assert [pid for pid in (*node.servers(), *node.spares()) if is_alive(pid)] == []
    left = [p for own in node.server_sockets for p in (own, f"{own}.lock") if os.path.exists(p)]
    assert left == [], left
