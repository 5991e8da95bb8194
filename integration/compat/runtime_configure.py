"""Translate ``nvidia-ctk runtime configure`` to arguments of ``nvshim configure``.

The shim's handler runs none of NVIDIA's programs, so most of the original's path flags have no
effect. Engine, configuration files, handler name and the default runtime do.
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
    """Return the arguments for ``nvshim configure``.

    Args:
        engine: "docker", "containerd" or "crio".
        path: the engine's configuration file; "" for the default.
        drop_in: the drop-in file; "" for the default.
        program: the engine's executable.
        mode: "config-file" or "oci-hook".
        config_source: "command" or "file".
        oci_hook_path: where the original writes its hook.
        name: the handler's name.
        runtime_path: NVIDIA's runtime, or the shim.
        hook_path: NVIDIA's hook.
        set_default: make the handler the default runtime.
        enable_cdi: make the engine apply CDI specs.
        dry_run: change nothing.

    Returns:
        The arguments after ``nvshim configure``, and a note for each flag that has no effect.

    Raises:
        NoCounterpart: an OCI hook was requested.
        FlagWithoutMeaning: a flag would change the result, and it is not supported.
    """
    if mode in _HOOK_MODES or oci_hook_path:
        raise NoCounterpart(
            "nvidia-ctk runtime configure --config-mode=oci-hook",
            found="the shim adds GPUs before a container is created, so it has no OCI hook",
            do="configure the runtime instead: leave --config-mode out",
        )
    if mode not in _FILE_MODES:
        raise FlagWithoutMeaning(f"--config-mode={mode}", found="is not a mode", do="leave it out")
    if drop_in and engine == "docker":
        raise FlagWithoutMeaning(
            f"--drop-in-config={drop_in}",
            found="Docker has no drop-in files",
            do="leave it out",
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
        "--executable-path": (program and engine not in _PROGRAMS, "the original ignores it too"),
        "--config-source": (config_source, "the file that the engine reads is changed"),
        "--cdi.enabled": (enable_cdi and not has_switch, "CRI-O always applies CDI specs"),
    }
    arguments = [part for flag, value in values.items() if flag and value for part in (flag, value)]
    arguments += [flag for flag, on in switches.items() if on]
    notes = [f"{flag} changes nothing here: {why}" for flag, (given, why) in idle.items() if given]
    return [engine, *arguments], notes
