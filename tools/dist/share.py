"""``share/``: units, completions, licenses, and the SBOM.

A package's license is its own statement: Debian's machine-readable copyright files name one for
each part; a project's metadata has it in one of three fields.

Source: Debian, copyright-format 1.0; PyPA, core metadata; package-url.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from tools.dist.inputs import Inputs
from tools.dist.interpreter import RELEASE, Packages
from tools.dist.sbom import Component, expression_of, write_lists
from tools.errors import TreeNotBuilt

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tools.dist.inputs import Inputs
    from tools.dist.interpreter import Packages

MANUAL: Final = "man/man1"
"""The directory of manual pages in ``share/``."""

PYTHON: Final = "runtime/bin/python3"

_COMPLETIONS: Final = {
    "bash": "bash-completion/completions/nvshim",
    "fish": "fish/vendor_completions.d/nvshim.fish",
    "zsh": "zsh/site-functions/_nvshim",
}
_LICENSE_NAMES: Final = re.compile(r"^(licen[cs]e|copying|notice|authors)", re.IGNORECASE)


def fill(
    tree: str, inputs: Inputs, packages: Packages, used: Iterable[str], projects: Mapping[str, str]
) -> None:
    """Create ``share/`` of an otherwise complete tree.

    Args:
        used: the packages that the tree uses.
        projects: the metadata directory of each project from PyPI, by ``NAME VERSION``.

    Raises:
        TreeNotBuilt: ``nvshim`` of the tree does not run.
    """
    share = os.path.join(tree, "share")
    units = os.path.join(inputs.source, "integration", "systemd")
    shutil.copytree(units, os.path.join(share, "systemd"))
    manifests = os.path.join(inputs.source, "integration", "kubernetes", "manifests")
    shutil.copytree(
        manifests, os.path.join(share, "kubernetes"), ignore=shutil.ignore_patterns(".*")
    )
    shutil.copy(os.path.join(inputs.source, "LICENSE"), share)
    _complete(tree, share)
    _write_manual(tree, share, inputs.source)
    licenses = os.path.join(share, "licenses")
    components = [_of_debian(packages.roots[name], name, licenses) for name in sorted(used)]
    components += [
        _of_pypi(directory, project, licenses) for project, directory in sorted(projects.items())
    ]
    write_lists(tree, inputs, components)


def _complete(tree: str, share: str) -> None:
    for shell, name in _COMPLETIONS.items():
        argv = [os.path.join(tree, "bin", "nvshim"), "completion", shell]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode or not done.stdout:
            raise TreeNotBuilt(
                f"the completion for {shell}",
                found=f"nvshim exited with {done.returncode}: {done.stderr.strip()[-300:]}",
            )
        path = os.path.join(share, name)
        os.makedirs(os.path.dirname(path))
        with open(path, "w", encoding="utf-8") as file:
            file.write(done.stdout)


def _write_manual(tree: str, share: str, source: str) -> None:
    """Write the manual pages with the tree's own interpreter, because they use its help texts."""
    argv = [os.path.join(tree, PYTHON), "-m", "tools.dist.man", os.path.join(share, MANUAL)]
    libraries = (source, os.path.join(tree, "lib"), os.path.join(tree, "lib-node"))
    environment = {"PYTHONPATH": ":".join(libraries), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        argv, env=environment, cwd=source, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise TreeNotBuilt("the manual pages", found=done.stderr.strip()[-300:])


def _of_debian(root: str, file: str, licenses: str) -> Component:
    name, version, architecture = file.removesuffix(".deb").split("_")
    version = version.replace("%3a", ":")
    # A package's directory may be a link to another package's.
    document = os.path.join(root, "usr", "share", "doc", name, "copyright")
    names: list[str] = []
    if os.path.exists(document):
        os.makedirs(os.path.join(licenses, name))
        shutil.copyfile(document, os.path.join(licenses, name, "copyright"))
        with open(document, encoding="utf-8", errors="replace") as copyright_file:
            names = re.findall(r"^License:[ \t]*(\S.*)$", copyright_file.read(), re.MULTILINE)
    purl = f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={architecture}&distro={RELEASE}"
    return Component(name, version, purl, tuple(sorted(set(names))))


def _of_pypi(directory: str, project: str, licenses: str) -> Component:
    name, version = project.split()
    with open(os.path.join(directory, "METADATA"), encoding="utf-8") as file:
        fields = file.read().partition("\n\n")[0]
    expression = re.findall(r"^License-Expression: (.+)$", fields, re.MULTILINE)
    for field in (r"Classifier: License :: OSI Approved :: (.+)", r"License: (.+)"):
        if found := expression or re.findall(rf"^{field}$", fields, re.MULTILINE):
            break
    for above, _, names in os.walk(directory):
        for document in names:
            if _LICENSE_NAMES.match(document):
                os.makedirs(os.path.join(licenses, name), exist_ok=True)
                shutil.copyfile(
                    os.path.join(above, document), os.path.join(licenses, name, document)
                )
    purl = f"pkg:pypi/{quote(name)}@{quote(version)}"
    return Component(name, version, purl, tuple(found), expression_of(expression))
