"""Unix sockets, without an event loop: checking peers, and connecting."""

from __future__ import annotations

import errno
import os
import socket
from struct import Struct
from typing import Final

from api.ttrpc.errors import ConnectFailed, PeerRejected, TtrpcError
from api.ttrpc.service import Credentials

# accept(2) fails with these for a temporary shortage; the connection stays in the backlog.
PASSING: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
# … and with these for one connection that has already ended.
ABORTED: Final = frozenset({errno.ECONNABORTED, errno.EPROTO, errno.EPERM})

_UCRED: Final = Struct("iII")


def peer_credentials(sock: socket.socket) -> Credentials:
    """Return the process at the other end of a connected unix socket.

    Source: unix(7), SO_PEERCRED.
    """
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return Credentials(*_UCRED.unpack(data))


def check_peer(sock: socket.socket) -> Credentials:
    """Return the client's process, before a byte of it is read.

    Raises:
        PeerRejected: it does not belong to our user and group.
    """
    peer = peer_credentials(sock)
    ours = (os.geteuid(), os.getegid())
    if (peer.uid, peer.gid) != ours:
        raise PeerRejected(
            f"a connection from process {peer.pid}",
            found=f"uid {peer.uid} and gid {peer.gid}; only {ours[0]} and {ours[1]} may",
        )
    return peer


def connect(path: str) -> socket.socket | None:
    """Return a connected socket, non-blocking; None while the server's backlog is full.

    A unix socket with a full backlog answers EAGAIN and cannot be polled: try again later.

    Args:
        path: the path of the socket, with or without ``unix://`` before it.

    Raises:
        ConnectFailed: no server listens there.
    """
    path = path.removeprefix("unix://")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.connect(path)
    except BlockingIOError:
        sock.close()
        return None
    except OSError as error:
        sock.close()
        raise ConnectFailed(
            f"connect to {path}",
            found=errno.errorcode.get(error.errno or 0, "") or str(error),
            do="check that the server runs and listens there",
        ) from error
    except BaseException:
        sock.close()
        raise
    return sock


def backlog_full(path: str, timeout: float) -> TtrpcError:
    """Return the error for a backlog that stays full."""
    path = path.removeprefix("unix://")
    return ConnectFailed(f"connect to {path}", found=f"a backlog still full after {timeout:g} s")
