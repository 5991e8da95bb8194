"""A private containerd as tests use it: with the images in it, and watched for what stays."""

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
"""Of containerd, and so of runc: they live for a short time, and may need more memory meanwhile."""


@contextmanager
def containerd_with_images(
    parts: Parts, images: Iterable[Image] | str, *, shim_directory: str, shim_config: str
) -> Iterator[PrivateContainerd]:
    """A running containerd with images in it, removed at the end.

    Args:
        images: what to import, or the archive in which somebody has written it.
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
    """Fail the test if anything of its containers is left. What is left is removed."""
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
