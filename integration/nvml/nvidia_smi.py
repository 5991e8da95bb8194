"""Running the driver's nvidia-smi, for what NVML has no function for.

A driver root that is a system of its own, as in a driver container, is the program's root. While
it runs NVML is open, and so the lock of that is shared; or had alone, by whoever needs NVML closed
(:mod:`integration.nvml.lock`).

Source: nvidia-smi(1).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

from api.errors import one_line
from integration.driver_launch import launch_line, where_programs_run
from integration.driver_programs import run_for
from integration.nvml.lock import NONE, opening

if TYPE_CHECKING:
    from hooks.config import Config
    from hooks.node.driver import Driver

__all__ = ["SmiFailed", "run_nvidia_smi"]

_PROGRAM: Final = "nvidia-smi"
_PATH: Final = "/usr/sbin:/usr/bin:/sbin:/bin"


class SmiFailed(Exception):
    """nvidia-smi did not do what it was to do; its caller says what that was.

    Attributes:
        found: what has happened.
        do: what a person can do about it; "" if nvidia-smi itself has said more.
    """

    def __init__(self, found: str, do: str = "") -> None:
        super().__init__(found)
        self.found = found
        self.do = do


def run_nvidia_smi(
    driver: Driver,
    config: Config,
    arguments: Sequence[str],
    timeout: float,
    *,
    ends_with_us: bool = False,
    lock: int = NONE,
) -> str:
    """Run it, until it has ended.

    Args:
        driver: whose it is.
        timeout: seconds after which it is killed.
        ends_with_us: whether it is killed, too, once we are no more: what it would do then is no
            longer wanted. A reset goes on, as a GPU is better reset than half reset.
        lock: a descriptor of the lock of NVML that the caller has, which it inherits.

    Returns:
        What it said, in one line.

    Raises:
        SmiFailed: it is not there, does not end, or ends with another status than 0.
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
        with nullcontext(lock) if lock != NONE else opening(config.state, timeout) as held:
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
            f"{_PROGRAM} has not ended after {timeout:g} s",
            "see the kernel's log, and reboot the node",
        ) from error
    except OSError as error:
        raise SmiFailed(f"{program}: {error.strerror}", "see that it can be executed") from error
    said = one_line(done.stdout.decode(errors="replace")) or "nothing"
    if done.returncode:
        raise SmiFailed(f"{_PROGRAM} ended with status {done.returncode} and said: {said}")
    return said
