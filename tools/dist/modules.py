"""``lib/`` and ``lib-node/``: our packages, and those from PyPI that they import.

Which versions those are is in the requirements files, with the digests of what may be installed.
What the shim imports is kept apart from what only people's programs import: one of the shim's
packages imports rich if it sees it.

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

# Nothing that a running program reads, and of an installation what names its circumstances. The
# Helm chart is an archive of its own.
_LEFT_OUT: Final = ("__pycache__", "chart", "*.pyi", "*.proto", "py.typed", "*~", ".*")
_OF_INSTALLATION: Final = frozenset({"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"})
# Of the lexers those of the formats that nvshim shows.
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
        # A package that has moved leaves a directory in a checkout, with caches alone.
        for directory, below, files in os.walk(copy, topdown=False):
            if not files and not any(os.path.isdir(os.path.join(directory, x)) for x in below):
                os.rmdir(directory)


def install(source: str, packages: Packages, cache: str) -> str:
    """Have what the requirements files name, installed in one directory.

    Args:
        packages: Debian's, with the interpreter that it is for.
        cache: where installations are kept, by what they are of.

    Returns:
        The directory, which is nobody's to change.

    Raises:
        TreeNotBuilt: something cannot be had.
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
    """Copy what :func:`install` has installed to the one library or the other.

    Args:
        source: the checkout.
        site: where it is installed.
        library: for what the shim imports.
        node_library: for everything else.

    Returns:
        The directory of each project's metadata below its library, by ``NAME VERSION``.

    Raises:
        TreeNotBuilt: an installed file is not there.
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
    """A project's name, in the one way of writing it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", project).lower()
