"""The contents of a distribution's package in addition to the tree, and its scripts.

The package manager owns the tree that it has unpacked below /usr/lib, and replaces its files on an
upgrade. No shim may run from files that are replaced. So the package's scripts run ``nvshim
install``, which copies the tree below the prefix. There each version has its own directory, which
is removed when nothing uses it. ``nvshim install`` also installs the links to the programs, and not
the package manager: a restarted containerd looks for the program by the path with which it has
started a shim, so the program stays as long as its containers, also after a removal of the package.
If there is a runc or crun, the new version has to start a container first; set
``NVSHIM_SELF_TEST=0`` in the package manager's environment where that is not possible, as in an
image build. The user enables the units. Enabled units stop with the package, before it is
uninstalled, because the agent's process uses the installed tree.

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
"""The directory of the package manager's tree."""

DESCRIPTION: Final = (
    "A containerd shim (runtime v2), one process per pod, with an engine for NVIDIA",
    "GPUs in it: no hook, no wrapper of runc. With it comes nvshim, which",
    "configures, inspects and examines a node.",
    "",
    "The package brings its own interpreter, and installs each version into a",
    f"directory of its own below /opt/{PROJECT}, where it stays as long",
    "as a container needs it.",
)

# The error that an engine names the shim, from integration.install, which imports this room.
_STILL_NAMED: Final = "NVSHIM-E2637"

# Errors of systemctl do not fail the script: without systemd there are no units.
_COMMON: Final = """\
nvshim=/usr/lib/containerd-shim-nvidia/bin/nvshim
units='{units}'
systemd() {
  if [ -d /run/systemd/system ]; then systemctl "$@" || :; fi
}
# Start a container before the switch, if there is a runtime for it. systemd already knows the new
# units then: running ones stop when another version is in effect, and are restarted.
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
# Files that containers still need stay, and so does everything while an engine names the shim;
# nvshim reports that. It is not a failure.
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
# After a failed removal, restart the units that it has stopped.
start_again() {
  for unit in $units; do
    if systemctl is-enabled --quiet "$unit" 2>/dev/null; then systemd start "$unit"; fi
  done
}
"""


def script(text: str, units: list[str]) -> str:
    """Return a package's script.

    Args:
        text: its commands, which use the functions above.
        units: the names of the package's units.
    """
    common = _COMMON.replace("{units}", " ".join(units))
    return common.replace("{found}", str(exits.FOUND)).replace("{named}", _STILL_NAMED) + text


def preview(inputs: Inputs) -> str:
    """Return the suffix that sorts a version before the next one; empty for a release."""
    if inputs.released:
        return ""
    when = time.strftime("%Y%m%d.%H%M%S", time.gmtime(inputs.epoch))
    return f"~{when}.{inputs.revision.replace('-', '.') or 'unknown'}"


def fill(root: str, tree: Tree, inputs: Inputs, *, units: str, zsh: str) -> list[str]:
    """Create a package's file system, without the files of only one kind of package.

    Args:
        tree: already at its path, on the same file system.
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
    """Set one mode and time for directories, which were created under any umask."""
    for above, _, _ in os.walk(root, topdown=False):
        os.chmod(above, 0o755)
        os.utime(above, (epoch, epoch))


def read(path: str) -> bytes:
    """Return a file's content."""
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
    """Create a hard link, or a copy if the target is on another file system."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copy2(source, target, follow_symlinks=False)


def _link_tree(source: str, target: str) -> None:
    """Copy a tree with hard links to its files."""
    for above, directories, names in os.walk(source):
        to = os.path.join(target, os.path.relpath(above, source))
        os.makedirs(to)
        for name in names:
            link_or_copy(os.path.join(above, name), os.path.join(to, name))
        directories.sort()
