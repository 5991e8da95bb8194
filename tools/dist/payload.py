"""What a package of a distribution has besides the tree, and the scripts that go with it.

The package manager owns the tree that it has unpacked, below /usr/lib, and replaces its files when
the package is upgraded. No shim may run from files that are replaced, so none does: the package's
scripts have ``nvshim install`` put a copy of the tree below the prefix, where every version has a
directory of its own that goes when nothing uses it any more. The links to the programs are
installed with it, and not the package manager's: a containerd that is restarted looks for the
program by whose path it has started a shim, so it stays as long as its containers do, also if the
package is removed. Where there is a runc or crun, the new version has to start a container first;
``NVSHIM_SELF_TEST=0`` in the package manager's environment is for where none can be started, as in
a build of an image. The units are for a person to enable; those that are, end with the package,
before it is uninstalled: the agent's process uses what it was installed as.

Source: systemctl(1); Debian Policy 6.5; the Fedora packaging guidelines, Scriptlets.
"""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import time
from typing import TYPE_CHECKING, Final

from integration import exits
from tools.dist.archive import PROJECT
from tools.dist.share import MANUAL

if TYPE_CHECKING:
    from integration.tree import Tree
    from tools.dist.inputs import Inputs

PLACE: Final = f"usr/lib/{PROJECT}"
"""Where the package manager's tree is."""

DESCRIPTION: Final = (
    "A containerd shim (runtime v2), one process per pod, with an engine for NVIDIA",
    "GPUs in it: no hook, no wrapper of runc. With it comes nvshim, which",
    "configures, inspects and examines a node.",
    "",
    "The package brings its own interpreter, and installs each version into a",
    f"directory of its own below /opt/{PROJECT}, where it stays as long",
    "as a container needs it.",
)

# That an engine names the shim; of integration.install, which builds on this room.
_STILL_NAMED: Final = "NVSHIM-E2637"

# What systemd says is no reason to fail: without it nothing of this is needed.
_COMMON: Final = """\
nvshim=/usr/lib/containerd-shim-nvidia/bin/nvshim
units='{units}'
systemd() {
  if [ -d /run/systemd/system ]; then systemctl "$@" || :; fi
}
# A container is started before anything is switched, where there is something to start it with. By
# then systemd knows the new units: those that run end when another version is in effect, and are
# started again.
install() {
  systemd daemon-reload
  test=--no-self-test
  if [ "${NVSHIM_SELF_TEST:-1}" != 0 ]; then
    for runtime in runc crun; do
      if command -v "$runtime" >/dev/null; then test=; fi
    done
  fi
  "$nvshim" install --from /usr/lib/containerd-shim-nvidia --bindir /usr/bin $test
}
# What containers still need stays, and so does all of it while an engine names the shim; nvshim
# says so, and stays with it. That is no failure.
uninstall() {
  status=0
  said=$("$1" uninstall --bindir /usr/bin 2>&1) || status=$?
  echo "$said"
  case "$status $said" in
    0*|{found}*|*'{named}'*) ;;
    *) return "$status" ;;
  esac
}
stop() {
  systemd stop $units
}
disable() {
  if command -v systemctl >/dev/null; then systemctl --quiet disable $units || :; fi
}
# After a removal that failed, what it has stopped.
start_again() {
  for unit in $units; do
    if systemctl is-enabled --quiet "$unit" 2>/dev/null; then systemd start "$unit"; fi
  done
}
"""


def script(text: str, units: list[str]) -> str:
    """A script of a package.

    Args:
        text: what it does, by the functions above.
        units: the names of the package's units.
    """
    common = _COMMON.replace("{units}", " ".join(units))
    return common.replace("{found}", str(exits.FOUND)).replace("{named}", _STILL_NAMED) + text


def preview(inputs: Inputs) -> str:
    """What marks a version as one before the next: empty for a release."""
    if inputs.released:
        return ""
    when = time.strftime("%Y%m%d.%H%M%S", time.gmtime(inputs.epoch))
    return f"~{when}.{inputs.revision.replace('-', '.') or 'unknown'}"


def fill(root: str, tree: Tree, inputs: Inputs, *, units: str, zsh: str) -> list[str]:
    """Make a package's file system, but for what only one kind of package has.

    Args:
        tree: it lies at its path, on the same file system.
        units: the directory of units, relative to the root.

    Returns:
        The names of the units.
    """
    place = os.path.join(root, PLACE)
    _link_tree(tree.path, place)
    share = os.path.join(place, "share")
    files = {}
    names = sorted(os.listdir(f"{share}/systemd"))
    for name in names:
        unit = read(f"{share}/systemd/{name}")
        files[f"{units}/{name}"] = unit.replace(b"/usr/local/bin/", b"/usr/bin/")
    for completion in ("bash-completion/completions", "fish/vendor_completions.d"):
        for name in os.listdir(f"{share}/{completion}"):
            files[f"usr/share/{completion}/{name}"] = read(f"{share}/{completion}/{name}")
    files[f"{zsh}/_nvshim"] = read(f"{share}/zsh/site-functions/_nvshim")
    for name in os.listdir(f"{share}/{MANUAL}"):
        page = gzip.compress(read(f"{share}/{MANUAL}/{name}"), 9, mtime=inputs.epoch)
        files[f"usr/share/{MANUAL}/{name}.gz"] = page
    for name, content in files.items():
        write(os.path.join(root, name), content, inputs.epoch)
    return names


def set_directories(root: str, epoch: int) -> None:
    """Give the directories, which were made under whatever umask, one mode and time."""
    for above, _, _ in os.walk(root, topdown=False):
        os.chmod(above, 0o755)
        os.utime(above, (epoch, epoch))


def read(path: str) -> bytes:
    """A file's content."""
    with open(path, "rb") as file:
        return file.read()


def write(path: str, content: bytes, epoch: int, mode: int = 0o644) -> None:
    """Write a file of a package."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)
    os.chmod(path, mode)
    os.utime(path, (epoch, epoch))


def link_or_copy(source: str, target: str) -> None:
    """Make a hard link, or a copy where the file system of the target is another one."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copy2(source, target, follow_symlinks=False)


def _link_tree(source: str, target: str) -> None:
    """Have a tree a second time, with its files once."""
    for above, directories, names in os.walk(source):
        to = os.path.join(target, os.path.relpath(above, source))
        os.makedirs(to)
        for name in names:
            link_or_copy(os.path.join(above, name), os.path.join(to, name))
        directories.sort()
