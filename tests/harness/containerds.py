"""A private containerd for tests: it has the images, and is checked for leftovers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import pytest

from tests.harness.leaks import Census, describe
from tools.containerd import PrivateContainerd
from tools.images import Image, write_archive
from tools.parts import Parts

ENVIRONMENT: Final = {"GOGC": "400"}
"""Variables of containerd, and so of runc: short-lived processes, which may use more memory."""


@contextmanager
def containerd_with_images(
    parts: Parts, images: Iterable[Image] | str, *, shim_directory: str, shim_config: str
) -> Iterator[PrivateContainerd]:
    """Run a containerd with images in it, and remove it at the end.

    Args:
        images: the images to import, or the path of an archive with them.
    """
    # Not below pytest's directory: the paths of unix sockets are short.
    with PrivateContainerd(
        shim_directory=shim_directory,
        shim_config=shim_config,
        environment=ENVIRONMENT,
        parts=parts,
    ) as containerd:
        if isinstance(images, str):
            containerd.ctr("images", "import", images)
        else:
            archive = write_archive(f"{containerd.directory}/images.tar", images)
            containerd.ctr("images", "import", archive)
            os.unlink(archive)
        yield containerd


@contextmanager
def nothing_left(containerd: PrivateContainerd) -> Iterator[None]:
    """Fail the test if anything of its containers is left, and remove that."""
    if not containerd.pid:
        containerd.start()
    census = Census(containerd)
    yield
    if not containerd.pid:
        containerd.start()
    left = census.leftovers()
    if left:
        message = describe(left, containerd.log())
        census.remove(left)
        pytest.fail(message, pytrace=False)
