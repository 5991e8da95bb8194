"""The shim's main function: prepare to serve.

Without a fork server, this imports the shim's server, which takes longer than everything else. A
container with GPUs also needs the injection engine. Its worker imports it at the same time, on
another processor.
"""

from __future__ import annotations

import gc
import os
from typing import NoReturn

from shim import syscalls
from shim.children import Reaper, raise_file_limit, reserve_numbers
from shim.log import Log
from shim.pod import fd_reserve
from shim.work.injection import look_ahead


def main(
    *,
    listener_fd: int,
    container_id: str,
    namespace: str,
    ttrpc_address: str,
    socket_path: str,
    debug: bool,
) -> NoReturn:
    """Serve until containerd asks the shim to exit and no task is left.

    Args:
        listener_fd: the listening socket.
        container_id: the first container, for which this shim started. The current directory is the
            container's bundle.
        namespace: containerd's namespace.
        ttrpc_address: containerd's socket for events.
        socket_path: the file of the listening socket, which is removed at the end.
        debug: whether to log each step.
    """
    # Imported objects stay; searching them for garbage costs a tenth of the time.
    gc.disable()
    syscalls.give_back_large_blocks()
    raise_file_limit()
    listener_fd = reserve_numbers(listener_fd)
    fd_reserve.fill()
    log = Log(os.getcwd(), debug=debug, shim=container_id, namespace=namespace)
    reaper = Reaper()
    look_ahead(os.getcwd(), reaper, log)
    from shim.pod.server import run  # noqa: PLC0415 - see above

    gc.freeze()
    gc.enable()
    run(
        listener_fd=listener_fd,
        addressed=(namespace, ttrpc_address),
        socket_path=socket_path,
        log=log,
        reaper=reaper,
    )
