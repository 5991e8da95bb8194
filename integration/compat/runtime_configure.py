"""``nvidia-ctk runtime configure`` as words for ``nvshim configure``.

A handler of ours has no program of NVIDIA's behind it, so most of what the original is told of
paths has no meaning; which engine, which files, which name, and whether it is the default, has.
"""

from __future__ import annotations

import posixpath
from typing import Final

from integration.compat.errors import FlagWithoutMeaning, NoCounterpart

_HOOK_MODES: Final = frozenset({"oci-hook", "hook"})
_FILE_MODES: Final = frozenset({"", "config-file", "config"})
_SHIM: Final = "containerd-shim-nvidia"
_PROGRAMS: Final = {"containerd": "--containerd", "crio": "--crio"}


def arguments_of(
    *,
    engine: str,
    path: str = "",
    drop_in: str = "",
    program: str = "",
    mode: str = "",
    config_source: str | None = None,
    oci_hook_path: str = "",
    name: str = "nvidia",
    runtime_path: str = "",
    hook_path: str = "",
    set_default: bool = False,
    enable_cdi: bool = False,
    dry_run: bool = False,
) -> tuple[list[str], list[str]]:
    """The words of our command.

    Args:
        engine: "docker", "containerd" or "crio".
        path: the engine's configuration; "" for where it is.
        drop_in: the drop-in; "" for where it would be.
        program: the engine's program.
        mode: "config-file", or "oci-hook".
        config_source: "command" or "file".
        oci_hook_path: where the hook would be written.
        name: the handler's.
        runtime_path: NVIDIA's runtime, or the shim.
        hook_path: NVIDIA's hook.
        set_default: whether containers that name no runtime get it.
        enable_cdi: whether the engine applies CDI specs.
        dry_run: whether nothing is changed.

    Returns:
        The words after ``nvshim configure``, and what of the flags changes nothing, for people.

    Raises:
        NoCounterpart: an OCI hook is asked for.
        FlagWithoutMeaning: a flag would change the result, and nothing here can follow it.
    """
    if mode in _HOOK_MODES or oci_hook_path:
        raise NoCounterpart(
            "nvidia-ctk runtime configure --config-mode=oci-hook",
            found="there is no hook: the shim gives a container its GPUs before it is made",
            do="configure the runtime: leave --config-mode out",
        )
    if mode not in _FILE_MODES:
        raise FlagWithoutMeaning(f"--config-mode={mode}", found="no such mode", do="leave it out")
    if drop_in and engine == "docker":
        raise FlagWithoutMeaning(
            f"--drop-in-config={drop_in}", found="docker reads one file", do="leave it out"
        )
    is_shim = posixpath.basename(runtime_path).startswith(_SHIM)
    has_switch = engine != "crio"
    values = {
        "--config": path,
        "--drop-in": drop_in,
        "--runtime-name": name if name != "nvidia" else "",
        "--shim": runtime_path if is_shim else "",
        _PROGRAMS.get(engine, ""): program,
    }
    switches = {
        "--set-default": set_default,
        "--enable-cdi": enable_cdi and has_switch,
        "--dry-run": dry_run,
    }
    idle = {
        "--nvidia-runtime-path": (runtime_path and not is_shim, "the runtime is the shim"),
        "--nvidia-runtime-hook-path": (hook_path, "there is no hook"),
        "--executable-path": (program and engine not in _PROGRAMS, "the original ignores it, too"),
        "--config-source": (config_source, "what the engine reads is what is changed"),
        "--cdi.enabled": (enable_cdi and not has_switch, "CRI-O always applies CDI specs"),
    }
    words = [word for flag, value in values.items() if flag and value for word in (flag, value)]
    words += [flag for flag, on in switches.items() if on]
    notes = [f"{flag} changes nothing here: {why}" for flag, (given, why) in idle.items() if given]
    return [engine, *words], notes
