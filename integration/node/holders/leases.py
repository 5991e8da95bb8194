"""The claims of ``[sharing]`` (:mod:`shim.work.claims`) for people, and the end of dead ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from hooks.config import Config
from integration.agent_errors import ClaimHolds, ClaimsUnreadable, ClaimUnknown
from shim.work import claims


def claim_rows(config: Config) -> list[dict[str, Any]]:
    """Which container claims what.

    Returns:
        An object for each claim; the keys are an interface.

    Raises:
        ClaimsUnreadable: the caller is not root.
    """
    try:
        found = list(claims.read_claims(_directory(config)))
    except OSError as error:
        raise _unreadable(config, error) from error
    return [
        {
            "claim": name,
            "container": None if kept is None else kept.title,
            "bundle": None if kept is None else kept.bundle,
            "devices": [] if kept is None else list(kept.devices),
            "dead": not holds or kept is None or claims.has_ended(kept.bundle),
        }
        for name, kept, holds in found
    ]


def release(config: Config, named: Sequence[str]) -> list[str]:
    """Remove dead claims. A container's next one would do that; nothing else needs it.

    Args:
        named: claims, bundles or containers; none for all that are dead.

    Returns:
        The claims that were removed.

    Raises:
        ClaimUnknown: there is none of that name; nothing was removed.
        ClaimHolds: one of them is not dead; nothing was removed.
        ClaimsUnreadable: the caller is not root.
    """
    rows = claim_rows(config)
    meant = [row for row in rows if row["dead"]] if not named else []
    for name in named:
        found = [row for row in rows if name in _names(row)]
        if not found:
            raise ClaimUnknown(
                f"to release {name}",
                found="nobody claims a device by that name",
                do="see `nvshim ledger claims`",
            )
        for row in found:
            if not row["dead"]:
                raise _holds(name, row)
        meant += [row for row in found if row not in meant]
    removed = []
    for row in meant:
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


def _holds(name: str, row: dict[str, Any]) -> ClaimHolds:
    return ClaimHolds(
        f"to release {name}",
        found=f"{row['container']} has not ended, or its bundle {row['bundle']} is being made",
        do="delete its task; the claim goes with it",
    )


def _directory(config: Config) -> str:
    return os.path.join(config.state, claims.DIRECTORY)


def _unreadable(config: Config, error: OSError) -> ClaimsUnreadable:
    return ClaimsUnreadable(
        f"the claims in {_directory(config)}", found=str(error.strerror).lower(), do="ask as root"
    )
