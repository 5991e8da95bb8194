"""The .deb that a tree is handed on as.

The package manager owns the tree that it has unpacked, below /usr/lib, and replaces its files when
the package is upgraded. No shim may run from files that are replaced, so none does: the package's
scripts have ``nvshim install`` put a copy of the tree below the prefix, where every version has a
directory of its own that goes when nothing uses it any more. The links to the programs are
installed with it, and not the package manager's: a containerd that is restarted looks for the
program by whose path it has started a shim, so it stays as long as its containers do, also if the
package is removed. Where there is a runc or crun, the new version has to start a container first;
``NVSHIM_SELF_TEST=0`` in dpkg's environment is for where none can be started, as in a build of an
image. The units are for a person to enable; those that are, end with the package, before it is
uninstalled: the agent's process uses what it was installed as.

Source: Debian Policy 3.2, 6.5, 9.1; deb(5), deb-control(5), deb-version(7); copyright-format 1.0;
systemctl(1).
"""

from __future__ import annotations

import gzip
import hashlib
import os
import subprocess
import tempfile
import time
from email.utils import formatdate
from typing import TYPE_CHECKING, Final

from integration.cli import exits
from tests.tools.dist.archive import PROJECT
from tests.tools.errors import TreeNotBuilt

if TYPE_CHECKING:
    from tests.tools.dist.inputs import Inputs
    from integration.tree import Tree

PLACE: Final = f"usr/lib/{PROJECT}"
"""Where the package manager's tree is."""

_MAINTAINER: Final = "The containerd-shim-nvidia authors <containerd-shim-nvidia@packages.invalid>"

_CONTROL: Final = """\
Package: {project}
Version: {version}
Architecture: {architecture}
Maintainer: {maintainer}
Installed-Size: {size}
Section: admin
Priority: optional
Recommends: containerd | containerd.io, runc | crun | containerd.io
Description: containerd shim that gives containers their GPUs
 A containerd shim (runtime v2), one process per pod, with an engine for NVIDIA
 GPUs in it: no hook, no wrapper of runc. With it comes nvshim, which
 configures, inspects and examines a node.
 .
 The package brings its own interpreter, and installs each version into a
 directory of its own below /opt/containerd-shim-nvidia, where it stays as long
 as a container needs it.
"""

# That an engine names the shim; of integration.install, which builds on this room.
_STILL_NAMED: Final = "NVSHIM-E2637"

# What systemd says is no reason to fail: without it nothing of this is needed.
_COMMON: Final = """\
#!/bin/sh
set -e
nvshim=/usr/lib/containerd-shim-nvidia/bin/nvshim
units='{units}'
systemd() {
  if [ -d /run/systemd/system ]; then systemctl "$@" || :; fi
}
# What containers still need stays, and so does all of it while an engine names the shim; nvshim says
# so, and stays with it. That is no failure.
uninstall() {
  status=0
  said=$("$1" uninstall --bindir /usr/bin 2>&1) || status=$?
  echo "$said"
  case "$status $said" in
    0*|{found}*|*'{named}'*) ;;
    *) exit "$status" ;;
  esac
}
"""

# A container is started before anything is switched, where there is something to start it with. By
# then systemd knows the new units: those that run end when another version is in effect, and are
# started again.
_POSTINST: Final = (
    _COMMON
    + """\
case "$1" in
  configure|abort-upgrade|abort-remove|abort-deconfigure)
    systemd daemon-reload
    test=--no-self-test
    if [ "${NVSHIM_SELF_TEST:-1}" != 0 ]; then
      for runtime in runc crun; do
        if command -v "$runtime" >/dev/null; then test=; fi
      done
    fi
    "$nvshim" install --from /usr/lib/containerd-shim-nvidia --bindir /usr/bin $test
    ;;
esac
if [ "$1" = abort-remove ]; then
  for unit in $units; do
    if systemctl is-enabled --quiet "$unit" 2>/dev/null; then systemd start "$unit"; fi
  done
fi
"""
)

# Not on an upgrade: then the next version takes over what is installed.
_PRERM: Final = (
    _COMMON
    + """\
if [ "$1" = remove ]; then
  systemd stop $units
  uninstall "$nvshim"
  if command -v systemctl >/dev/null; then systemctl --quiet disable $units || :; fi
fi
"""
)

# What stayed has a nvshim of its own.
_POSTRM: Final = (
    _COMMON
    + """\
case "$1" in
  remove)
    systemd daemon-reload
    ;;
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
)

_COPYRIGHT: Final = """\
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: containerd-shim-nvidia
Comment:
 The package contains CPython and libraries of Debian, and packages of PyPI. Which, and in which
 versions, is in /usr/lib/containerd-shim-nvidia/share/sbom.cdx.json; their licenses are beside it,
 in licenses.

Files: *
Copyright: {year} the containerd-shim-nvidia authors
License: Apache-2.0
 On Debian systems, the text of the license is in /usr/share/common-licenses/Apache-2.0.
"""

# A tree that runs on hosts with another libc, or none, brings its libraries, and an interpreter as
# Debian has built it with what is compiled for that; the unit is started with containerd.
_OVERRIDES: Final = """\
{project}: hardening-no-pie
{project}: package-installs-python-pycache-dir
{project}: script-not-executable
{project}: shared-library-lacks-prerequisites
{project}: systemd-service-file-refers-to-unusual-wantedby-target
{project}: undeclared-elf-prerequisites
{project}: unusual-interpreter
"""


def package_version(inputs: Inputs) -> str:
    """The package's version: that of the project, or one before it that later commits are after."""
    if inputs.released:
        return f"{inputs.version}-1"
    when = time.strftime("%Y%m%d.%H%M%S", time.gmtime(inputs.epoch))
    revision = inputs.revision.replace("-", ".") or "unknown"
    return f"{inputs.version}~{when}.{revision}-1"


def package_name(inputs: Inputs) -> str:
    """What the package's file is called."""
    return f"{PROJECT}_{package_version(inputs)}_{inputs.architecture}.deb"


def write_package(tree: Tree, inputs: Inputs, path: str, *, compression: str = "-Zxz -z1") -> None:
    """Write a tree's package, whole or not at all.

    Args:
        tree: it lies at its path.
        inputs: what it was made of.
        path: where to; what is there is replaced.
        compression: options of dpkg-deb.

    Raises:
        TreeNotBuilt: dpkg-deb is not there, or failed.
    """
    parent = os.path.dirname(os.path.abspath(path))
    with tempfile.TemporaryDirectory(prefix=".deb-", dir=parent) as work:
        os.chmod(work, 0o755)  # noqa: S103 - what the package has as its root
        root = os.path.join(work, "root")
        _fill(root, tree, inputs)
        new = os.path.join(work, "package.deb")
        argv = ["dpkg-deb", *compression.split(), "--root-owner-group", "--build", root, new]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(inputs.epoch), "LC_ALL": "C.UTF-8"}
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
    """Make the package's file system and its control files."""
    place = os.path.join(root, PLACE)
    _link_tree(tree.path, place)
    document = f"usr/share/doc/{PROJECT}"
    files = {
        f"{document}/copyright": _COPYRIGHT.format(year=time.gmtime(inputs.epoch).tm_year).encode(),
        f"{document}/changelog.Debian.gz": gzip.compress(
            _changelog(inputs).encode(), 9, mtime=inputs.epoch
        ),
        f"usr/share/lintian/overrides/{PROJECT}": _OVERRIDES.format(project=PROJECT).encode(),
    }
    units = sorted(os.listdir(f"{place}/share/systemd"))
    for name in units:
        unit = _read(f"{place}/share/systemd/{name}")
        files[f"lib/systemd/system/{name}"] = unit.replace(b"/usr/local/bin/", b"/usr/bin/")
    for completion in ("bash-completion/completions", "fish/vendor_completions.d"):
        for name in os.listdir(f"{place}/share/{completion}"):
            files[f"usr/share/{completion}/{name}"] = _read(f"{place}/share/{completion}/{name}")
    for name in os.listdir(f"{place}/share/man/man1"):
        page = gzip.compress(_read(f"{place}/share/man/man1/{name}"), 9, mtime=inputs.epoch)
        files[f"usr/share/man/man1/{name}.gz"] = page
    files["usr/share/zsh/vendor-completions/_nvshim"] = _read(
        f"{place}/share/zsh/site-functions/_nvshim"
    )
    for name, content in files.items():
        _write(os.path.join(root, name), content, inputs.epoch)
    sums, size = [], 0
    for name in sorted(_names(root)):
        whole = os.path.join(root, name)
        if not os.path.islink(whole):
            content = _read(whole)
            size += len(content)
            sums.append(f"{hashlib.md5(content, usedforsecurity=False).hexdigest()}  {name}\n")
    control = {
        "control": _CONTROL.format(
            project=PROJECT,
            version=package_version(inputs),
            architecture=inputs.architecture,
            maintainer=_MAINTAINER,
            size=-(-size // 1024),
        ),
        "md5sums": "".join(sums),
        "postinst": _script(_POSTINST, units),
        "prerm": _script(_PRERM, units),
        "postrm": _script(_POSTRM, units),
    }
    for name, text in control.items():
        mode = 0o755 if text.startswith("#!") else 0o644
        _write(os.path.join(root, "DEBIAN", name), text.encode(), inputs.epoch, mode)
    _set_directories(root, inputs.epoch)


def _script(text: str, units: list[str]) -> str:
    """A script of the package, with its blanks filled in."""
    text = text.replace("{units}", " ".join(units))
    return text.replace("{found}", str(exits.FOUND)).replace("{named}", _STILL_NAMED)


def _changelog(inputs: Inputs) -> str:
    return (
        f"{PROJECT} ({package_version(inputs)}) unstable; urgency=medium\n\n"
        f"  * Built from {inputs.revision or 'a checkout without its history'}.\n\n"
        f" -- {_MAINTAINER}  {formatdate(inputs.epoch)}\n"
    )


def _link_tree(source: str, target: str) -> None:
    """Have a tree a second time, with its files once."""
    for above, directories, names in os.walk(source):
        to = os.path.join(target, os.path.relpath(above, source))
        os.makedirs(to)
        for name in names:
            os.link(os.path.join(above, name), os.path.join(to, name), follow_symlinks=False)
        directories.sort()


def _names(root: str) -> list[str]:
    return [
        os.path.relpath(os.path.join(above, name), root)
        for above, _, names in os.walk(root)
        for name in names
    ]


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _write(path: str, content: bytes, epoch: int, mode: int = 0o644) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)
    os.chmod(path, mode)
    os.utime(path, (epoch, epoch))


def _set_directories(root: str, epoch: int) -> None:
    """Give the directories, which were made under whatever umask, one mode and time."""
    for above, _, _ in os.walk(root, topdown=False):
        os.chmod(above, 0o755)  # noqa: S103 - everybody may look
        os.utime(above, (epoch, epoch))
