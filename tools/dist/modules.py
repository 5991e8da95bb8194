"""``lib/`` and ``lib-node/``: our packages, and the packages from PyPI that they import.

The requirements files list the versions, with the allowed digests. The shim's packages are in a
separate directory from those of the command line, because one of them imports rich if it finds it.

Source: PyPA, recording installed projects (RECORD); PEP 376.
"""

from __future__ import annotations

import csv
import hashlib
import os
import re
import shutil
import tempfile
from typing import Final

from tools.dist import interpreter
from tools.dist.interpreter import Packages
from tools.errors import TreeNotBuilt

OURS: Final = ("api", "hooks", "integration", "shim")
REQUIREMENTS: Final = ("requirements/runtime.txt", "requirements/node.txt")

# Files that no running program reads, and metadata about the installation. The Helm chart is a
# separate archive.
_LEFT_OUT: Final = ("__pycache__", "chart", "*.pyi", "*.proto", "py.typed", "*~", ".*")
_OF_INSTALLATION: Final = frozenset({"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"})
# Only the lexers of the formats that nvshim shows.
_FOREIGN_LEFT_OUT: Final = re.compile(
    r"^\.\.|^/|^bin/|^example\.py$|\.pyi$|(^|/)(py\.typed|__pycache__|tests?)(/|$)|\.(c|h|pxd|pyx)$"
    r"|^pygments/lexers/(?!(__init__|_mapping|configs|data|diff|python|special|text)\.py$)"
)


def copy_ours(source: str, library: str) -> None:
    """Copy our packages."""
    for package in OURS:
        copy = os.path.join(library, package)
        shutil.copytree(
            os.path.join(source, package), copy, ignore=shutil.ignore_patterns(*_LEFT_OUT)
        )
        # A moved package leaves a directory with only caches in a checkout.
        for directory, below, files in os.walk(copy, topdown=False):
            if not files and not any(os.path.isdir(os.path.join(directory, x)) for x in below):
                os.rmdir(directory)


def install(source: str, packages: Packages, cache: str) -> str:
    """Install the packages of the requirements files in one directory.

    Args:
        packages: Debian's, with the interpreter that it is for.
        cache: the directory of installations, by their inputs.

    Returns:
        The directory, which must not be changed.

    Raises:
        TreeNotBuilt: a package cannot be downloaded.
    """
    requirements = os.path.join(source, REQUIREMENTS[-1])
    with open(requirements, "rb") as file:
        digest = hashlib.sha256(file.read())
    for package in sorted(packages.roots):
        if package.startswith((interpreter.PYTHON, "python3-pip")):
            digest.update(package.encode())
    directory = os.path.join(cache, f"site-{digest.hexdigest()[:16]}")
    if os.path.isdir(directory):
        return directory
    os.makedirs(cache, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".site-", dir=cache) as work:
        new = os.path.join(work, "site")
        interpreter.pip(
            packages, "install", "--quiet", "--disable-pip-version-check", "--no-compile",
            "--no-deps", "--only-binary=:all:", "--require-hashes", "--no-warn-script-location",
            "--root-user-action=ignore", "--target", new, "--requirement", requirements,
        )  # fmt: skip
        try:
            os.rename(new, directory)
        except OSError:
            if not os.path.isdir(directory):  # or another build was faster
                raise
    return directory


def copy_theirs(source: str, site: str, library: str, node_library: str) -> dict[str, str]:
    """Copy the result of :func:`install` to one library or the other.

    Args:
        source: the checkout.
        site: the directory of the installation.
        library: for the shim's imports.
        node_library: for everything else.

    Returns:
        The directory of each project's metadata below its library, by ``NAME VERSION``.

    Raises:
        TreeNotBuilt: an installed file is missing.
    """
    of_the_shim = _names(os.path.join(source, REQUIREMENTS[0]))
    found = {}
    for name in sorted(os.listdir(site)):
        if not name.endswith(".dist-info"):
            continue
        project, _, version = name.removesuffix(".dist-info").partition("-")
        to = library if _normal(project) in of_the_shim else node_library
        found[f"{_normal(project)} {version}"] = os.path.join(to, name)
        with open(os.path.join(site, name, "RECORD"), encoding="utf-8", newline="") as record:
            files = [row[0] for row in csv.reader(record) if row]
        for file in files:
            if _FOREIGN_LEFT_OUT.search(file) or os.path.basename(file) in _OF_INSTALLATION:
                continue
            target = os.path.join(to, file)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            try:
                shutil.copyfile(os.path.join(site, file), target)
            except FileNotFoundError as error:
                raise TreeNotBuilt(
                    f"{name} for the tree", found=f"no {file} below {site}", do=f"remove {site}"
                ) from error
    missing = of_the_shim - {name.partition(" ")[0] for name in found}
    if missing:
        raise TreeNotBuilt(
            "the packages of the shim", found=f"no {', '.join(sorted(missing))}", do="make lock"
        )
    return found


def _names(requirements: str) -> set[str]:
    with open(requirements, encoding="utf-8") as file:
        return {_normal(match) for match in re.findall(r"^([\w.-]+)==", file.read(), re.MULTILINE)}


def _normal(project: str) -> str:
    """Return a project's normalized name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", project).lower()
