"""Knowing again how claims share devices, where what was written down of it is lost.

The kubelet's record, which stands in then, does not say it (:mod:`.state`); the API server does. It
is waited for only if containers of a claim may be clients of an MPS control daemon: a daemon that
no claim asks for ends, and they would go on without it. That is so where the claim's CDI spec,
which its containers were made with, has a daemon's pipes, and those are a daemon's still.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import anyio

from api.errors import NvshimError
from integration.agent_errors import KubeconfigUnusable
from integration.apiserver.status import is_away
from integration.backoff import Backoff
from integration.files import read_file
from integration.json_documents import parse_json
from integration.node.mps.paths import CONTAINER_ROOT, LOCK
from integration.node.services.dra import cdi

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from hooks.config import Config
    from integration.node.values.claims import Claim

__all__ = ["has_daemon", "recall"]

_UNAUTHENTICATED: Final = 401
_UNREAD: Final = (OSError, ValueError, KeyError, TypeError, AttributeError)


def has_daemon(config: Config, driver: str, claim: Claim) -> bool:
    """Whether containers of a claim were made clients of a daemon that is there."""
    try:
        spec = parse_json(read_file(cdi.path_of(config, driver, claim.uid)) or b"")
        return any(
            os.path.lexists(os.path.join(os.path.dirname(mount["hostPath"]), LOCK))
            for device in spec["devices"]
            for mount in device["containerEdits"].get("mounts") or ()
            if mount["containerPath"].startswith(f"{CONTAINER_ROOT}/")
        )
    except _UNREAD:
        return False


def _says_nothing(error: NvshimError) -> bool:
    """Whether an error is of the server, or of who asks it, and may be over soon."""
    is_nobody = getattr(error, "http", 0) == _UNAUTHENTICATED
    return is_away(error) or is_nobody or isinstance(error, KubeconfigUnusable)


async def recall(
    claims: Collection[Claim],
    read: Callable[[Claim], Awaitable[Claim]],
    needs: Callable[[Claim], bool],
    fault: Callable[[str, str], None],
) -> dict[str, Claim]:
    """Claims as the API server has them, as far as it says.

    Args:
        claims: as the kubelet has noted them.
        read: reads one from the server.
        needs: whether the server is waited for to say it of this one.
        fault: says what is waited for.

    Returns:
        Those that have the devices that they had, by their UIDs.
    """
    found: dict[str, Claim] = {}
    needing = {claim.uid for claim in claims if needs(claim)}
    backoff = Backoff()
    for claim in sorted(claims, key=lambda each: each.uid not in needing):
        away: NvshimError | None = None
        while claim.uid not in found:
            try:
                now = await read(claim)
            except NvshimError as error:
                away = error if _says_nothing(error) else None
                if away is None or claim.uid not in needing:
                    break  # it is as the kubelet says
                fault("claims", f"how {claim} shares its devices is not known: {error}")
                await anyio.sleep(backoff.pause())
                continue
            if {each.device for each in now.devices} != {each.device for each in claim.devices}:
                break
            found[claim.uid] = now
        if away is not None and claim.uid not in needing:
            break  # nor does it say it of others
    fault("claims", "")
    return found
