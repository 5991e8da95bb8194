"""Build all files of a release in one directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from typing import TYPE_CHECKING, Final

from integration.simulated.packages import default_cache
from tools.dist import debian, rpm, sbom
from tools.dist.archive import archive_name, write_tarball
from tools.dist.build import build as build_tree
from tools.dist.interpreter import Packages
from tools.images import write_archive
from tools.node_image import node_image
from tools.release.chart import chart_name, write_chart
from tools.release.provenance import statement, write_statement
from tools.release.signing import public_half, sign, write_sums

if TYPE_CHECKING:
    from collections.abc import Callable

    from tools.dist.inputs import Inputs

__all__ = ["KEYS", "build"]

KEYS: Final = "RELEASE_KEYS"
"""The repository's file with the public keys of releases."""


def build(
    directory: str, inputs: Inputs, *, cache: str, key: str = "", say: Callable[[str], None] = print
) -> list[str]:
    """Make a release from these inputs.

    Args:
        directory: gets the tree and the release, as ``tree`` and ``release``; an older release is
            replaced as a whole.
        key: the file of the signing key; without one the release is not signed.
        say: called with one line for each step.

    Returns:
        The names of its files.

    Raises:
        NvshimError: something could not be built. The previous release is unchanged.
    """
    if key:
        public_half(key)  # check it before minutes of work
    directory = os.path.abspath(directory)
    tree = build_tree(os.path.join(directory, "tree"), inputs, cache=cache, say=say)
    stem = archive_name(tree).removesuffix(".tar.gz")
    release = os.path.join(directory, "release")
    with tempfile.TemporaryDirectory(prefix=".release-", dir=directory) as work:
        new = os.path.join(work, "release")
        os.mkdir(new)

        def place(name: str) -> str:
            say(f"{release}/{name}")
            return os.path.join(new, name)

        write_tarball(tree, place(archive_name(tree)))
        debian.write_package(tree, inputs, place(debian.package_name(inputs)))
        rpm.write_package(tree, inputs, place(rpm.package_name(inputs)))
        write_archive(place(f"{stem}.image.tar"), [node_image(tree.path)])
        write_chart(place(chart_name(inputs.version)), inputs.epoch)
        for name in (sbom.CYCLONEDX, sbom.SPDX):
            ending = os.path.basename(name).removeprefix("sbom")
            shutil.copyfile(os.path.join(tree.path, name), place(f"{stem}{ending}"))
        made = statement(inputs, new, os.listdir(new), _packages(), _commit(inputs.source))
        write_statement(place(f"{stem}.intoto.json"), made)
        write_sums(new, os.listdir(new))
        if key and not sign(new, key, os.path.join(inputs.source, KEYS)):
            say(f"{key} is not in {KEYS}: users cannot verify the signature until it is")
        for name in os.listdir(new):
            os.chmod(os.path.join(new, name), 0o644)
        os.chmod(new, 0o755)
        shutil.rmtree(release, ignore_errors=True)
        os.rename(new, release)
    return sorted(os.listdir(release))


def _packages() -> dict[str, str]:
    """Return the files of the Debian packages that a tree is made from."""
    return {name: os.path.join(default_cache(), "dist", name) for name in Packages.have().roots}


def _commit(source: str) -> str:
    argv = ["git", "-C", source, "rev-parse", "HEAD"]
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
