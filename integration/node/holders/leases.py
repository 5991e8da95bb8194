"""List the leases of ``[sharing]`` and remove dead ones.

The command line and the files call leases claims (:mod:`shim.work.claims`). They have nothing to do
with resource claims.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from hooks.config import Config
from integration.agent_errors import ClaimHolds, ClaimsUnreadable, ClaimUnknown, NodeAgentError
from shim.work import claims


def claim_rows(config: Config) -> list[dict[str, Any]]:
    """Return the claims with their containers and devices.

    Returns:
        An object for each claim; the keys are an interface.

    Raises:
        ClaimsUnreadable: the caller is not root.
    """
    try:
        entries = list(claims.read_claims(_directory(config)))
    except OSError as error:
        raise _unreadable(config, error) from error
    return [
        {
            "claim": name,
            "container": None if claim is None else claim.title,
            "bundle": None if claim is None else claim.bundle,
            "devices": [] if claim is None else list(claim.devices),
            "dead": not holds or claim is None or claims.has_ended(claim.bundle),
        }
        for name, claim, holds in entries
    ]


def release(config: Config, named: Sequence[str]) -> list[str]:
    """Remove dead claims.

    This is optional: the shim removes dead claims when it makes the next one.

    Args:
        named: claims, bundles or containers; empty for all dead claims.

    Returns:
        The removed claims.

    Raises:
        ClaimUnknown: a name matches no claim; nothing was removed.
        ClaimHolds: a named claim is not dead; nothing was removed.
        ClaimsUnreadable: the caller is not root.
    """
    rows = claim_rows(config)
    selected = [row for row in rows if row["dead"]] if not named else []
    for name in named:
        matching = [row for row in rows if name in _names(row)]
        if not matching:
            raise ClaimUnknown(
                f"to release {name}",
                found="no claim, container or bundle has that name",
                do="run `nvshim ledger claims` to list the claims",
            )
        for row in matching:
            if not row["dead"]:
                raise _holds(name, row)
        selected += [row for row in matching if row not in selected]
    removed = []
    for row in selected:
        try:
            is_removed = claims.remove_dead(_directory(config), row["claim"])
        except OSError as error:
            raise _unreadable(config, error) from error
        if is_removed:
            removed.append(row["claim"])
        elif named:
            raise _holds(row["claim"], row)
    return removed


def _names(row: dict[str, Any]) -> set[str]:
    names = {row["claim"], row["container"], row["bundle"]}
    if row["bundle"]:
        names.add(os.path.basename(row["bundle"]))
    return names - {None}


def _holds(name: str, row: dict[str, Any]) -> NodeAgentError:
    return ClaimHolds(
        f"to release {name}",
        found=f"{row['container']} has not exited, or its bundle {row['bundle']} is being created",
        do="delete the container's task; that releases the claim",
    )


def _directory(config: Config) -> str:
    return os.path.join(config.state, claims.DIRECTORY)


def _unreadable(config: Config, error: OSError) -> NodeAgentError:
    return ClaimsUnreadable(
        f"the claims in {_directory(config)}",
        found=str(error.strerror).lower(),
        do="run the command as root",
    )
