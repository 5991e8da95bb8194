"""Write to the API server whenever topics change, and retry on failure.

The agent logs a refused call once. It repeats the call after a minute, or sooner if a topic
changes, but not before the time that a busy server names. From time to time it compares the cluster
with what it wrote: a Node that was deleted and registered again, for example, has lost it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing
from typing import Final, NoReturn

import anyio

from api.errors import NvshimError
from integration.apiserver.client import ApiServer
from integration.apiserver.status import retry_after
from integration.detached import run_detached
from integration.node.options import Options
from integration.node.service import Context
from integration.node.state.topic import Watched, version_of, wait_any

_RETRY_AFTER: Final = 60.0  # seconds
_CHECK_AFTER: Final = 600.0  # seconds


async def keep_reported(
    context: Context,
    write: Callable[[ApiServer], None],
    *topics: Watched,
    forget: Callable[[], object] | None = None,
) -> NoReturn:
    """Write to the cluster now, and whenever one of the topics changes, until cancelled.

    Args:
        write: called in a thread; raises a typed error if the server refuses.
        topics: what ``write`` reads.
        forget: called before a ``write`` that has to compare with the cluster again; None if
            nothing needs to be compared.
    """
    failed, due = "", time.monotonic() + _CHECK_AFTER
    with closing(api_server_of(context.options)) as api:
        while True:
            version, line, busy = version_of(*topics), "", 0.0
            try:
                await run_detached(write, api)
            except NvshimError as error:
                line, busy = str(error), min(retry_after(error), _RETRY_AFTER)
            if line and line != failed:
                context.say("warning", line)
            failed = line
            if busy:
                await anyio.sleep(busy)
            timeout = _RETRY_AFTER - busy if line else math.inf
            if forget is not None:
                timeout = min(timeout, max(0.0, due - time.monotonic()))
            await wait_any(*topics, since=version, timeout=timeout)
            if forget is not None and time.monotonic() >= due:
                forget()
                due = time.monotonic() + _CHECK_AFTER


def api_server_of(options: Options) -> ApiServer:
    """Return a client of the API server that the agent's options name."""
    return ApiServer(
        options.api_server,
        options.api_port,
        options.service_account,
        options.kubeconfig,
        options.api_timeout,
    )
