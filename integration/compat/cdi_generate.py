"""The flags of ``nvidia-ctk cdi generate`` as a wish of ours.

Its spec has hooks, and ours has none, so that what is said of hooks and of ldconfig has no meaning
but for a hook that is asked for: that is an error, as is a machine of another kind.
"""

from __future__ import annotations

from typing import Final

from hooks.cdi.generating import Wish
from integration.compat.errors import FlagWithoutMeaning

__all__ = ["MODES", "STRATEGIES", "wish_of"]

_KINDS: Final = {
    "auto": "gpu",
    "nvml": "gpu",
    "management": "management",
    "gds": "gds",
    "mofed": "mofed",
    "gdrcopy": "gdrcopy",
    "nvswitch": "nvswitch",
    "imex": "imex-channel",
}
_OTHER_MACHINES: Final = ("csv", "wsl")
MODES: Final = (*_KINDS, *_OTHER_MACHINES)
STRATEGIES: Final = ("index", "uuid", "type-index")

_NO_HOOKS: Final = "the spec has no hooks"
_IDLE: Final = {
    "--config-search-path": "files are found where drivers have them",
    "--library-search-path": "libraries are found where drivers and loaders have them",
    "--nvidia-cdi-hook-path": _NO_HOOKS,
    "--ldconfig-path": _NO_HOOKS,
    "--disable-hook": _NO_HOOKS,
}
_ELSEWHERE: Final = "no spec is written of such a machine"
_REFUSED: Final = {
    "--enable-hook": f"{_NO_HOOKS}, and needs none",
    "--csv.file": _ELSEWHERE,
    "--csv.ignore-pattern": _ELSEWHERE,
    "--csv.compat-container-root": _ELSEWHERE,
}
_LIVE: Final = "run containers with the shim, which resolves devices when they start"

_NO_GROUPS: Final = "no-additional-gids-for-device-nodes"
_FEATURES: Final = {
    _NO_GROUPS: "",
    "disable-nvsandboxutils": "that library is not asked",
}


def wish_of(
    *,
    mode: str = "auto",
    vendor: str = "",
    class_: str = "",
    strategies: tuple[str, ...] = (),
    devices: tuple[str, ...] = (),
    no_all_device: bool = False,
    features: tuple[str, ...] = (),
    others: frozenset[str] = frozenset(),
) -> tuple[Wish, list[str]]:
    """What a spec is to be of.

    Args:
        mode: of :data:`MODES`.
        vendor: "" for the mode's own.
        class_: "" for the mode's own.
        strategies: of :data:`STRATEGIES`; none for index and uuid.
        devices: names of GPUs and MIG devices; none for all.
        no_all_device: whether there is no device ``all``.
        features: feature flags.
        others: which of the other flags were given, by their first names.

    Returns:
        The wish, and what of the flags changes nothing, for people.

    Raises:
        FlagWithoutMeaning: a flag would change the result, and nothing here can follow it.
    """
    for strategy in strategies:
        if strategy not in STRATEGIES:
            raise FlagWithoutMeaning(
                f"--device-name-strategy={strategy}",
                found="no such strategy",
                do=f"use {', '.join(STRATEGIES)}",
            )
    if mode in _OTHER_MACHINES:
        raise _refused(f"--mode={mode}", _ELSEWHERE)
    for flag, why in _REFUSED.items():
        if flag in others:
            raise _refused(flag, why)
    for feature in features:
        if feature not in _FEATURES:
            raise FlagWithoutMeaning(
                f"--feature-flag={feature}", found="it has no meaning here", do="leave it out"
            )
    notes = [f"{flag} changes nothing here: {why}" for flag, why in _IDLE.items() if flag in others]
    notes += [
        f"--feature-flag={feature} changes nothing here: {_FEATURES[feature]}"
        for feature in features
        if _FEATURES[feature]
    ]
    wish = Wish(
        kind=_KINDS[mode],
        vendor=vendor,
        class_=class_,
        strategies=tuple(dict.fromkeys(strategies)) or ("index", "uuid"),
        devices=devices,
        all_device=not no_all_device,
        groups=_NO_GROUPS not in features,
    )
    return wish, notes


def _refused(flag: str, why: str) -> FlagWithoutMeaning:
    return FlagWithoutMeaning(f"nvidia-ctk cdi generate {flag}", found=why, do=_LIVE)
