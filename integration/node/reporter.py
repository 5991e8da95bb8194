"""Telling the cluster what a part of the agent has to say: when it differs, and until it is taken.

What the API server does not take is said once, and tried again after a while.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Final, NoReturn

from api.errors import NvshimError
from integration.apiserver.client import ApiServer
from integration.detached import aside

if TYPE_CHECKING:
    from integration.node.options import Options
    from integration.node.service import Context

_AGAIN: Final = 60.0  # seconds


async def keep_told(context: Context, tell: Callable[[ApiServer], None], *names: str) -> NoReturn:
    """Tell it now, and whenever that may be something else, until cancelled.

    Args:
        tell: called in a thread; a typed error says that it was not taken.
        names: of the board, by which it goes.
    """
    options, board, failed = context.options, context.board, ""
    with closing(api_server_of(options)) as api:
        while True:
            version, line = board.version(*names), ""
            try:
                await aside(tell, api)
            except NvshimError as error:
                line = str(error)
            if line and line != failed:
                context.say("warning", line)
            failed = line
            await board.change(*names, since=version, timeout=_AGAIN if line else math.inf)


def api_server_of(options: Options) -> ApiServer:
    """The API server that the agent is told to ask."""
    return ApiServer(
        options.api_server,
        options.api_port,
        options.service_account,
        options.kubeconfig,
        options.api_timeout,
    )
