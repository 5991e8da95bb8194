"""Run the driver's nvidia-smi for tasks for which NVML has no function.

If the driver root is a complete system, as in a driver container, it becomes the program's root
directory. nvidia-smi opens NVML, so it inherits the lock of NVML (:mod:`integration.nvml.lock`): a
shared one, or an exclusive one if NVML must be closed for the task.

Source: nvidia-smi(1).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Final

from api.errors import one_line
from hooks.config import Config
from hooks.node.driver import Driver
from integration.driver_launch import launch_line, where_programs_run
from integration.driver_programs import run_for
from integration.nvml.lock import NONE, break_lock, exclusive, shared
from integration.timeouts import PATIENCE

__all__ = ["TO_CLOSE", "NvmlInUse", "SmiFailed", "run_alone", "run_nvidia_smi"]

TO_CLOSE: Final = 10.0 * PATIENCE
"""Seconds that our processes have to close NVML."""

_PROGRAM: Final = "nvidia-smi"
_PATH: Final = "/usr/sbin:/usr/bin:/sbin:/bin"


class SmiFailed(Exception):
    """nvidia-smi failed; the caller knows the purpose of the call.

    Attributes:
        found: what happened.
        do: the remedy; "" if it is in nvidia-smi's own output.
    """

    def __init__(self, found: str, do: str = "") -> None:
        super().__init__(found)
        self.found = found
        self.do = do


class NvmlInUse(SmiFailed):
    """nvidia-smi was not started: a process of ours has NVML open, or there can be no lock."""


def run_alone(
    driver: Driver,
    config: Config,
    arguments: Sequence[str],
    timeout: float,
    *,
    ends_with_us: bool = False,
    is_due: Callable[[], bool] = lambda: True,
) -> str | None:
    """Run nvidia-smi as :func:`run_nvidia_smi` does, while no process of ours has NVML open.

    Args:
        is_due: called once NVML is closed; if it returns False, nvidia-smi is not run.

    Raises:
        NvmlInUse: a process does not close NVML; or the lock file cannot be created (see the
            cause).
    """
    with ExitStack() as stack:
        try:
            lock = stack.enter_context(exclusive(config.state, TO_CLOSE))
        except OSError as error:
            raise NvmlInUse(f"{error.filename}: {error.strerror}") from error
        if lock is None:
            raise NvmlInUse("a program of ours still has NVML open")
        if not is_due():
            return None
        try:
            return run_nvidia_smi(
                driver, config, arguments, timeout, ends_with_us=ends_with_us, lock=lock
            )
        except SmiFailed as error:
            if isinstance(error.__cause__, subprocess.TimeoutExpired):
                break_lock(config.state)  # nvidia-smi may hang, and holds the lock
            raise


def run_nvidia_smi(
    driver: Driver,
    config: Config,
    arguments: Sequence[str],
    timeout: float,
    *,
    ends_with_us: bool = False,
    lock: int = NONE,
) -> str:
    """Run nvidia-smi and wait for it.

    Args:
        driver: the driver that nvidia-smi belongs to.
        config: where the lock of NVML and the device nodes are.
        arguments: its command line.
        timeout: seconds after which it is killed.
        ends_with_us: kill it when this process exits, since its result is then not needed. A reset
            is allowed to finish: a GPU that was reset is better than one that was half reset.
        lock: a descriptor of the lock of NVML that the caller holds; nvidia-smi inherits it.

    Returns:
        Its output, in one line.

    Raises:
        SmiFailed: nvidia-smi does not exist, does not exit, or exits with a status other than 0.
    """
    program = next((file.source for file in driver.files if file.row == _PROGRAM), "")
    if not program:
        raise SmiFailed(
            f"no {_PROGRAM} among the files of driver {driver.version} below {driver.root}",
            "install it: Debian has it in nvidia-smi, Ubuntu in nvidia-utils",
        )
    root, libraries = where_programs_run(driver)
    environment = {"PATH": _PATH} | ({"LD_LIBRARY_PATH": libraries} if libraries else {})
    argv = [program, *arguments]
    if root or ends_with_us:
        argv = launch_line(
            program.removeprefix(root), root, environment, arguments=list(arguments),
            dev=config.dev, ends_with=os.getpid() if ends_with_us else 0,
        )  # fmt: skip
    try:
        with nullcontext(lock) if lock != NONE else shared(config.state, timeout) as held:
            if held is None:
                raise SmiFailed(
                    f"{_PROGRAM} would have to wait: a GPU is being reset, or its MIG mode switched"
                )
            done = run_for(
                argv, timeout, env=environment, merged=True,
                pass_fds=() if held == NONE else (held,),
            )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise SmiFailed(
            f"{_PROGRAM} did not exit within {timeout:g} s",
            "see the kernel's log, and reboot the node",
        ) from error
    except OSError as error:
        raise SmiFailed(f"{program}: {error.strerror}", "check that it can be executed") from error
    said = one_line(done.stdout.decode(errors="replace")) or "nothing"
    if done.returncode:
        raise SmiFailed(f"{_PROGRAM} exited with status {done.returncode}: {said}")
    return said
