"""Translate the flags of ``nvidia-ctk cdi generate`` to a request for our CDI generator.

The original's specs have hooks; ours need none. Flags about hook paths and ldconfig therefore have
no effect. Enabling a hook is an error, and so are the modes for Jetson (CSV) and WSL.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from hooks.cdi.generating import STRATEGIES, SpecOptions
from integration.compat.errors import FlagWithoutMeaning
from integration.errors import IntegrationError

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

_OTHER_PLATFORM: Final = "specs for Jetson (CSV) and WSL are not supported"
_NO_HOOKS: Final = "the spec has no hooks"
_NO_HOOK: Final = f"{_NO_HOOKS} and needs none"
_USE_SHIM: Final = "run containers with the shim, which resolves devices when they start"


class OtherFlag(NamedTuple):
    """A flag that is ignored with a note, or refused; its value does not matter."""

    names: tuple[str, ...]  # the first is the original's current name
    envvar: str  # the environment variable that sets it
    why: str  # why it has no effect, or is not supported
    refused: bool = False  # True if it would change the result: an error
    several: bool = True  # whether it may be repeated

    @property
    def parameter(self) -> str:
        """Return the flag's name as a Python parameter."""
        return self.names[0].strip("-").replace("-", "_").replace(".", "_")


OTHERS: Final[tuple[OtherFlag, ...]] = (
    OtherFlag(("--config-search-path",), envvar="NVIDIA_CTK_CDI_GENERATE_CONFIG_SEARCH_PATHS",
              why="files are searched where drivers install them"),
    OtherFlag(("--library-search-path",), envvar="NVIDIA_CTK_CDI_GENERATE_LIBRARY_SEARCH_PATHS",
              why="libraries are searched where drivers and the dynamic loader keep them"),
    OtherFlag(("--nvidia-cdi-hook-path", "--nvidia-ctk-path"), envvar="NVIDIA_CTK_CDI_HOOK_PATH",
              why=_NO_HOOKS, several=False),
    OtherFlag(("--ldconfig-path",), envvar="NVIDIA_CTK_CDI_GENERATE_LDCONFIG_PATH",
              why=_NO_HOOKS, several=False),
    OtherFlag(("--disable-hook", "--disable-hooks"),
              envvar="NVIDIA_CTK_CDI_GENERATE_DISABLED_HOOKS",
              why=_NO_HOOKS),
    OtherFlag(("--enable-hook", "--enable-hooks"), envvar="NVIDIA_CTK_CDI_GENERATE_ENABLED_HOOKS",
              why=_NO_HOOK, refused=True),
    OtherFlag(("--csv.file",), envvar="NVIDIA_CTK_CDI_GENERATE_CSV_FILES",
              why=_OTHER_PLATFORM, refused=True),
    OtherFlag(("--csv.ignore-pattern",), envvar="NVIDIA_CTK_CDI_GENERATE_CSV_IGNORE_PATTERNS",
              why=_OTHER_PLATFORM, refused=True),
)  # fmt: skip

_NO_GROUPS: Final = "no-additional-gids-for-device-nodes"
_FEATURES: Final = {
    _NO_GROUPS: "",
    "disable-nvsandboxutils": "that library is never used",
}


def generator_request(
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
    """Translate the flags to a request for :func:`hooks.cdi.generating.generate`.

    Args:
        mode: one of :data:`MODES`.
        vendor: "" for the mode's default.
        class_: "" for the mode's default.
        strategies: of :data:`~hooks.cdi.generating.STRATEGIES`; empty for index and uuid.
        devices: names of GPUs and MIG devices; empty for all.
        no_all_device: leave out the device ``all``.
        features: feature flags.
        others: the first names of the :data:`OTHERS` that were given.

    Returns:
        The request, and a note for each flag that has no effect.

    Raises:
        FlagWithoutMeaning: a flag would change the result, and it is not supported.
    """
    for strategy in strategies:
        if strategy not in STRATEGIES:
            raise FlagWithoutMeaning(
                f"--device-name-strategy={strategy}",
                found="is not a strategy",
                do=f"use {', '.join(STRATEGIES)}",
            )
    if mode in _OTHER_MACHINES:
        raise _refused(f"--mode={mode}", _OTHER_PLATFORM)
    given = [other for other in OTHERS if other.names[0] in others]
    for other in given:
        if other.refused:
            raise _refused(other.names[0], other.why)
    for feature in features:
        if feature not in _FEATURES:
            raise FlagWithoutMeaning(
                f"--feature-flag={feature}", found="is not supported", do="leave it out"
            )
    notes = [f"{other.names[0]} changes nothing here: {other.why}" for other in given]
    notes += [
        f"--feature-flag={feature} changes nothing here: {_FEATURES[feature]}"
        for feature in features
        if _FEATURES[feature]
    ]
    request = SpecOptions(
        kind=_KINDS[mode],
        vendor=vendor,
        class_=class_,
        strategies=tuple(dict.fromkeys(strategies)) or ("index", "uuid"),
        devices=devices,
        all_device=not no_all_device,
        groups=_NO_GROUPS not in features,
    )
    return request, notes


def _refused(flag: str, why: str) -> IntegrationError:
    return FlagWithoutMeaning(f"nvidia-ctk cdi generate {flag}", found=why, do=_USE_SHIM)
