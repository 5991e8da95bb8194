"""Run one container on a node, with a private containerd.

The containerd is the installed one, unmodified, in a temporary directory. The container runs
through this tree's shim, on a simulated node or on the real one. Everything is removed afterwards.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from typing import Final

from integration.simulated.containerd import PrivateContainerd
from integration.simulated.errors import ShimNotFound
from integration.simulated.images import GLIBC, glibc, write_archive
from shim import PROGRAM, RUNTIME_NAME

_ROOT: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_NAME: Final = "try"


def shim_directory() -> str:
    """Return the directory of the shim that containerd should execute.

    Returns:
        The directory of this installed tree, or of ``make setup`` in this checkout, or else of the
        shim on the search path.

    Raises:
        ShimNotFound: there is no shim.
    """
    candidates = [
        os.path.join(os.path.dirname(_ROOT), "bin"),
        os.path.join(_ROOT, ".cache", "bin"),
    ]
    for directory in candidates:
        if os.access(os.path.join(directory, PROGRAM), os.X_OK):
            return directory
    found = shutil.which(PROGRAM)
    if found is None:
        raise ShimNotFound(
            f"to find {PROGRAM} for containerd",
            found=f"none in {', '.join(candidates)} or on the search path",
            do="run `make setup` in the checkout, or install",
        )
    return os.path.dirname(found)


def run(
    config_path: str | None,
    words: Sequence[str],
    *,
    devices: str,
    capabilities: str,
    say: Callable[[str], None] = lambda _: None,
) -> int:
    """Run a command in a container with GPUs; its output goes to this process's output.

    Args:
        config_path: the shim's configuration; None for this machine's.
        words: the command, in an image with glibc and a shell.
        devices: the GPUs that the container requests.
        capabilities: the driver capabilities that it requests.
        say: receives progress messages; "" at the end.

    Returns:
        The command's exit status; 1, from ``ctr``, if the container could not be created.

    Raises:
        IntegrationError: a program is missing or does not start. Nothing is left behind.
    """
    containerd = PrivateContainerd(shim_directory=shim_directory(), shim_config=config_path)
    try:
        say("writing an image with glibc and a shell")
        archive = write_archive(os.path.join(containerd.directory, "image.tar"), [glibc()])
        say("starting a containerd, and copying the image into it")
        containerd.start()
        containerd.ctr("images", "import", archive)
        say("")
        flags = ["--rm", *container_flags(devices, capabilities)]
        with containerd.spawn_ctr("run", *flags, GLIBC, _NAME, *words) as process:
            return process.wait()
    finally:
        containerd.remove()


def container_flags(devices: str, capabilities: str) -> list[str]:
    """Return the flags of ``ctr run`` for a container that requests GPUs."""
    return [
        "--runtime", RUNTIME_NAME,
        "--env", f"NVIDIA_VISIBLE_DEVICES={devices}",
        "--env", f"NVIDIA_DRIVER_CAPABILITIES={capabilities}",
    ]  # fmt: skip
