"""The flags of ``nvidia-ctk cdi generate`` as a wish of ours.

Its spec has hooks, and ours has none, so that what is said of hooks and of ldconfig has no meaning
but for a hook that is asked for: that is an error, as is a machine of another kind.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from hooks.cdi.generating import STRATEGIES, SpecOptions
from integration.compat.errors import FlagWithoutMeaning

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

_ELSEWHERE: Final = "no spec is written of such a machine"
_NO_HOOKS: Final = "the spec has no hooks"
_NO_HOOK: Final = f"{_NO_HOOKS}, and needs none"
_LIVE: Final = "run containers with the shim, which resolves devices when they start"


class Other(NamedTuple):
    """A flag of which only matters whether it is given."""

    names: tuple[str, ...]  # the first is the original's own
    envvar: str  # its variable
    why: str  # it changes nothing, or cannot be followed
    refused: bool = False  # whether it would change the result, and is an error
    several: bool = True  # whether it may be repeated

    @property
    def parameter(self) -> str:
        """Its name as a parameter."""
        return self.names[0].strip("-").replace("-", "_").replace(".", "_")


OTHERS: Final = (
    Other(("--config-search-path",), envvar="NVIDIA_CTK_CDI_GENERATE_CONFIG_SEARCH_PATHS",
          why="files are found where drivers have them"),
    Other(("--library-search-path",), envvar="NVIDIA_CTK_CDI_GENERATE_LIBRARY_SEARCH_PATHS",
          why="libraries are found where drivers and loaders have them"),
    Other(("--nvidia-cdi-hook-path", "--nvidia-ctk-path"), envvar="NVIDIA_CTK_CDI_HOOK_PATH",
          why=_NO_HOOKS, several=False),
    Other(("--ldconfig-path",), envvar="NVIDIA_CTK_CDI_GENERATE_LDCONFIG_PATH",
          why=_NO_HOOKS, several=False),
    Other(("--disable-hook", "--disable-hooks"), envvar="NVIDIA_CTK_CDI_GENERATE_DISABLED_HOOKS",
          why=_NO_HOOKS),
    Other(("--enable-hook", "--enable-hooks"), envvar="NVIDIA_CTK_CDI_GENERATE_ENABLED_HOOKS",
          why=_NO_HOOK, refused=True),
    Other(("--csv.file",), envvar="NVIDIA_CTK_CDI_GENERATE_CSV_FILES",
          why=_ELSEWHERE, refused=True),
    Other(("--csv.ignore-pattern",), envvar="NVIDIA_CTK_CDI_GENERATE_CSV_IGNORE_PATTERNS",
          why=_ELSEWHERE, refused=True),
    Other(("--csv.compat-container-root",),
          envvar="NVIDIA_CTK_CDI_GENERATE_CSV_COMPAT_CONTAINER_ROOT",
          why=_ELSEWHERE, refused=True, several=False),
)  # fmt: skip

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
) -> tuple[SpecOptions, list[str]]:
    """What a spec is to be of.

    Args:
        mode: of :data:`MODES`.
        vendor: "" for the mode's own.
        class_: "" for the mode's own.
        strategies: of :data:`~hooks.cdi.generating.STRATEGIES`; none for index and uuid.
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
    given = [other for other in OTHERS if other.names[0] in others]
    for other in given:
        if other.refused:
            raise _refused(other.names[0], other.why)
    for feature in features:
        if feature not in _FEATURES:
            raise FlagWithoutMeaning(
                f"--feature-flag={feature}", found="it has no meaning here", do="leave it out"
            )
    notes = [f"{other.names[0]} changes nothing here: {other.why}" for other in given]
    notes += [
        f"--feature-flag={feature} changes nothing here: {_FEATURES[feature]}"
        for feature in features
        if _FEATURES[feature]
    ]
    wish = SpecOptions(
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
