"""A container on a node, with a containerd of its own: for who tries things.

The containerd is the installed one, unmodified, in a directory that goes with it; the container
runs through this tree's shim, on a simulated node or on the real one. Nothing is left.
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
    """The directory of the program that containerd is to execute.

    Returns:
        That of this installed tree, or what ``make setup`` has made in this checkout, or else the
        one on the search path.

    Raises:
        ShimNotFound: there is none.
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
            f"{PROGRAM} for containerd to execute",
            found=f"none in {', '.join(candidates)}, nor on the search path",
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
    """Run a command in a container with GPUs; it writes where this process does.

    Args:
        config_path: the shim's configuration; None for that of this machine.
        words: the command, in an image that has glibc and a shell.
        devices: which GPUs the container asks for.
        capabilities: which of the driver's.
        say: told in one line what is being done; "" once it is done.

    Returns:
        The exit status of the command; that of ``ctr``, 1, if the container could not be made.

    Raises:
        IntegrationError: something is not installed, or it does not start. Nothing is left.
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
    """What ``ctr run`` is told of a container that asks for GPUs."""
    return [
        "--runtime", RUNTIME_NAME,
        "--env", f"NVIDIA_VISIBLE_DEVICES={devices}",
        "--env", f"NVIDIA_DRIVER_CAPABILITIES={capabilities}",
    ]  # fmt: skip
