"""Recover how claims share devices after the checkpoint was lost.

The kubelet's record of claims replaces the checkpoint. It says nothing about sharing, but the API
server does. The driver waits for the server only if containers of a claim may be clients of an MPS
control daemon: the agent stops a daemon that no claim needs, and its clients would lose it. A claim
may have clients if its CDI spec mounts the pipes of a daemon, and that daemon still exists.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from typing import Final

import anyio

from api.errors import NvshimError
from hooks.config import Config
from integration.agent_errors import KubeconfigUnusable
from integration.apiserver.status import is_away
from integration.backoff import Backoff
from integration.files import read_file
from integration.json_documents import parse_json
from integration.node.mps.paths import CONTAINER_ROOT, LOCK
from integration.node.services.dra import cdi
from integration.node.values.claims import Claim

__all__ = ["has_daemon", "recall"]

_UNAUTHENTICATED: Final = 401
_UNREAD: Final = (OSError, ValueError, KeyError, TypeError, AttributeError)


def has_daemon(config: Config, driver: str, claim: Claim) -> bool:
    """Return whether containers of a claim are clients of an MPS daemon that exists."""
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


def _may_pass(error: NvshimError) -> bool:
    """Return whether an error comes from the connection or the credentials, and may pass."""
    is_unauthenticated = getattr(error, "http", 0) == _UNAUTHENTICATED
    return is_away(error) or is_unauthenticated or isinstance(error, KubeconfigUnusable)


async def recall(
    claims: Collection[Claim],
    read: Callable[[Claim], Awaitable[Claim]],
    needs: Callable[[Claim], bool],
    fault: Callable[[str, str], None],
) -> dict[str, Claim]:
    """Read from the API server how claims share their devices.

    Args:
        claims: the claims as the kubelet recorded them.
        read: reads a claim from the server.
        needs: whether to wait until the server answers about a claim.
        fault: reports what the driver is waiting for.

    Returns:
        The claims that still have the same devices, by UID.
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
                away = error if _may_pass(error) else None
                if away is None or claim.uid not in needing:
                    break  # the kubelet's record counts
                fault("claims", f"how {claim} shares its devices is not known: {error}")
                await anyio.sleep(backoff.pause())
                continue
            if {each.device for each in now.devices} != {each.device for each in claim.devices}:
                break
            found[claim.uid] = replace(now, has_metadata=claim.has_metadata)
        if away is not None and claim.uid not in needing:
            break  # the server answers about no other claim, either
    fault("claims", "")
    return found
