"""The .deb of a tree (:mod:`~tools.dist.payload` describes how it installs the tree).

Source: Debian Policy 3.2, 6.5, 9.1; deb(5), deb-control(5), deb-version(7); copyright-format 1.0;
lintian(1).
"""

from __future__ import annotations

import gzip
import hashlib
import os
import subprocess
import tempfile
import time
from email.utils import formatdate
from typing import Final

from integration.tree import Tree
from tools.dist import payload
from tools.dist.archive import PROJECT
from tools.dist.inputs import Inputs
from tools.dist.project import Project
from tools.errors import TreeNotBuilt

_CONTROL: Final = """\
Package: {project}
Version: {version}
Architecture: {architecture}
Maintainer: {maintainer}
Installed-Size: {size}
Section: admin
Priority: optional
Homepage: {home}
Recommends: containerd | containerd.io, runc | crun | containerd.io
Description: containerd shim that gives containers their GPUs
{description}
"""

_POSTINST: Final = """\
case "$1" in
  configure|abort-upgrade|abort-remove|abort-deconfigure) install ;;
esac
if [ "$1" = abort-remove ]; then start_again; fi
"""

# Not on an upgrade, when the next version takes over the installation.
_PRERM: Final = """\
if [ "$1" = remove ]; then
  stop
  uninstall "$nvshim"
  disable
fi
"""

# The remaining trees have their own nvshim.
_POSTRM: Final = """\
case "$1" in
  remove) systemd daemon-reload ;;
  purge)
    for nvshim in /opt/containerd-shim-nvidia/current/bin/nvshim \\
        /opt/containerd-shim-nvidia/*-*/bin/nvshim; do
      if [ -x "$nvshim" ]; then
        uninstall "$nvshim"
        break
      fi
    done
    ;;
esac
"""

_COPYRIGHT: Final = """\
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: containerd-shim-nvidia
Comment:
 The package contains CPython and libraries from Debian, and packages from PyPI. Their names and
 versions are in /usr/lib/containerd-shim-nvidia/share/sbom.cdx.json; their licenses are in the
 directory licenses next to it.

Files: *
Copyright: {year} the containerd-shim-nvidia authors
License: Apache-2.0
 On Debian systems, the text of the license is in /usr/share/common-licenses/Apache-2.0.
"""

# Intended findings of lintian: the reason, and its tags.
_OVERRIDES: Final = (
    (
        (
            "The package brings its own interpreter and libraries, as Debian and PyPI have built"
            " them, and runs on hosts with another libc, or none."
        ),
        ("embedded-library", "hardening-no-pie", "shared-library-is-executable",
         "shared-library-lacks-prerequisites", "undeclared-elf-prerequisites",
         "unusual-interpreter"),
    ),
    (
        "The programs that find the tree must not need a loader, which is in the tree.",
        ("statically-linked-binary",),
    ),
    (
        "Bytecode is part of the tree, in which nothing is ever written.",
        ("package-installs-python-pycache-dir",),
    ),
    (
        "The fork server is part of containerd's life.",
        ("systemd-service-file-refers-to-unusual-wantedby-target",),
    ),
    ("It is not uploaded to Debian.", ("initial-upload-closes-no-bugs",)),
)  # fmt: skip


def package_version(inputs: Inputs) -> str:
    """Return the package's version: the project's, or one that sorts before it and by commit."""
    return f"{inputs.version}{payload.preview(inputs)}-1"


def package_name(inputs: Inputs) -> str:
    """Return the name of the package's file."""
    return f"{PROJECT}_{package_version(inputs)}_{inputs.architecture}.deb"


def write_package(tree: Tree, inputs: Inputs, path: str, *, compression: str = "-Zxz -z1") -> None:
    """Write a tree's package, atomically.

    Args:
        path: where to; an existing file is replaced.

    Raises:
        TreeNotBuilt: dpkg-deb is missing, or failed.
    """
    parent = os.path.dirname(os.path.abspath(path))
    with tempfile.TemporaryDirectory(prefix=".deb-", dir=parent) as work:
        os.chmod(work, 0o755)
        root = os.path.join(work, "root")
        _fill(root, tree, inputs)
        new = os.path.join(work, "package.deb")
        argv = ["dpkg-deb", *compression.split(), "--root-owner-group", "--build", root, new]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(inputs.epoch), "LC_ALL": "C.UTF-8"}
        # Another number of threads would give other bytes.
        environment["DPKG_DEB_THREADS_MAX"] = "1"
        asked = f"the package {os.path.basename(path)}"
        try:
            done = subprocess.run(
                argv, env=environment, capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise TreeNotBuilt(asked, found="no dpkg-deb", do="install dpkg") from error
        if done.returncode:
            raise TreeNotBuilt(asked, found=done.stderr.strip()[-300:])
        os.rename(new, path)


def _fill(root: str, tree: Tree, inputs: Inputs) -> None:
    """Create the package's file system and its control files."""
    project = Project.of()
    units = payload.fill(
        root, tree, inputs, units="lib/systemd/system", zsh="usr/share/zsh/vendor-completions"
    )
    document = f"usr/share/doc/{PROJECT}"
    files = {
        f"{document}/copyright": _COPYRIGHT.format(year=time.gmtime(inputs.epoch).tm_year).encode(),
        f"{document}/changelog.Debian.gz": gzip.compress(
            _changelog(inputs, project).encode(), 9, mtime=inputs.epoch
        ),
        f"usr/share/lintian/overrides/{PROJECT}": _overrides().encode(),
    }
    for name, content in files.items():
        payload.write(os.path.join(root, name), content, inputs.epoch)
    sums, size = [], 0
    for name in sorted(_names(root)):
        whole = os.path.join(root, name)
        if not os.path.islink(whole):
            content = payload.read(whole)
            size += len(content)
            sums.append(f"{hashlib.md5(content, usedforsecurity=False).hexdigest()}  {name}\n")
    control = {
        "control": _CONTROL.format(
            project=PROJECT,
            version=package_version(inputs),
            architecture=inputs.architecture,
            maintainer=project.maintainer,
            home=project.home,
            description="\n".join(f" {line or '.'}" for line in payload.DESCRIPTION),
            size=-(-size // 1024),
        ),
        "md5sums": "".join(sums),
        "postinst": _script(_POSTINST, units),
        "prerm": _script(_PRERM, units),
        "postrm": _script(_POSTRM, units),
    }
    for name, text in control.items():
        mode = 0o755 if text.startswith("#!") else 0o644
        payload.write(os.path.join(root, "DEBIAN", name), text.encode(), inputs.epoch, mode)
    payload.set_directories(root, inputs.epoch)


def _script(text: str, units: list[str]) -> str:
    return f"#!/bin/sh\nset -e\n{payload.script(text, units)}"


def _overrides() -> str:
    lines = []
    for reason, tags in _OVERRIDES:
        lines += [f"# {reason}", *(f"{PROJECT}: {tag}" for tag in tags)]
    return "".join(f"{line}\n" for line in lines)


def _changelog(inputs: Inputs, project: Project) -> str:
    return (
        f"{PROJECT} ({package_version(inputs)}) unstable; urgency=medium\n\n"
        f"  * Built from {inputs.revision or 'a checkout without its history'}.\n\n"
        f" -- {project.maintainer}  {formatdate(inputs.epoch)}\n"
    )


def _names(root: str) -> list[str]:
    return [
        os.path.relpath(os.path.join(above, name), root)
        for above, _, names in os.walk(root)
        for name in names
    ]
