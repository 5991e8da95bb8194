"""``python -m tests.anywhere.root RELEASE -- COMMAND…``: run a command in a clone on Debian.

mmdebstrap installs the release with the packages that the README requires. git clones the checkout
into it, and the command runs in the clone. The machine's configuration of apt and pip is copied,
with the files that it names: without the mirrors and certificates nothing can be downloaded.

The root has its own mount, UTS, IPC and PID namespaces and its own /run and /tmp. It uses this
machine's kernel, /dev, cgroups and network. As on a real machine, its first process has the same
mounts as all others and reaps orphans, and its mounts are shared.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Final

from api.errors import NvshimError
from integration.simulated.packages import locked
from shim import syscalls
from tests.anywhere import KEPT
from tests.anywhere.first import be_first, exit_code
from tools import REPOSITORY
from tools.vm.guest import install

RELEASES: Final = ("bookworm", "trixie")

NAMED: Final = ("git", "make", "python3")
"""The packages that the README requires."""

_CLONE: Final = "/root/containerd-shim-nvidia"
_CONFIGURATION: Final = (
    "/etc/pip.conf", "/etc/xdg/pip", "~/.config/pip", "~/.pip",
    "/etc/apt/auth.conf", "/etc/apt/auth.conf.d", "/etc/resolv.conf",
    # The machine's own certificates, for update-ca-certificates.
    "/usr/local/share/ca-certificates",
)  # fmt: skip
# The sources and proxies of apt, which mmdebstrap writes into the root.
_APT: Final = ("/etc/apt/sources.list", "/etc/apt/sources.list.d/*", "/etc/apt/apt.conf.d/*")
# Mirrors, proxies and certificates of pip, git and TLS libraries.
_VARIABLE: Final = re.compile(r"(?i)PIP_\w+|\w+_proxy|SSL_CERT_\w+|GIT_SSL_\w+|REQUESTS_CA_BUNDLE")
# These control how the tests run. MAKEFLAGS contains WORKERS.
_HOW: Final = ("MAKEFLAGS", "NVSHIM_TEST_ORDER")
_PATH: Final = re.compile(r"(?:(?<=[\s=\"':,])|^|(?<=file://))/(?!/)[\w./+@-]+", re.MULTILINE)


def paths_in(text: str) -> list[str]:
    """Return the absolute paths in a configuration. Of URLs, only file:// ones have a path here."""
    return list(dict.fromkeys(match.rstrip("/.") for match in _PATH.findall(text)))


def main() -> int:
    """Create the root, and run the command in it.

    Returns:
        The command's exit status; 1 with one line on stderr if the root cannot be created.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.anywhere.root", description=__doc__)
    parser.add_argument("release", choices=RELEASES)
    parser.add_argument("--umask", default="022", help="umask of the clone and the command (022)")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    os.makedirs(KEPT, exist_ok=True)
    with locked(KEPT):  # one root at a time
        return _run(options.release, options.command, int(options.umask, 8))


def _run(release: str, command: list[str], umask: int) -> int:
    root = os.path.join(KEPT, f"root-{release}")
    shutil.rmtree(root, ignore_errors=True)
    try:
        install(release, NAMED, root)
    except NvshimError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    bound = list(_carry(root))
    os.umask(umask)
    argv = ["git", "clone", "--quiet", f"file://{REPOSITORY}", root + _CLONE]
    subprocess.run(argv, check=True)
    # A child mounts everything, so that the mounts end with it.
    if (child := os.fork()) == 0:
        syscalls.unshare(syscalls.CLONE_NEWPID)
        if (first := os.fork()) == 0:
            _enter(root, bound)
            os._exit(be_first(command, _environment()))
        os._exit(exit_code(os.waitpid(first, 0)[1]))
    code = exit_code(os.waitpid(child, 0)[1])
    if code == 0:
        shutil.rmtree(root, ignore_errors=True)
    return code


def _carry(root: str) -> Iterator[str]:
    """Copy the machine's configuration and the files that it names; yield directories to bind."""
    texts = [value for name, value in os.environ.items() if _VARIABLE.fullmatch(name)]
    for path in map(os.path.expanduser, _CONFIGURATION):
        for file in _files_of(path):
            _copy(file, root)
            texts.append(_read(file))
    for pattern in _APT:
        texts += map(_read, glob.glob(root + pattern))
    for each in paths_in("\n".join(texts)):
        # A package index of pip refers to files next to it (PEP 503).
        path = each.removesuffix("/simple")
        if os.path.lexists(root + path):
            continue
        if os.path.isfile(path):
            _copy(path, root)
        elif os.path.isdir(path):
            os.makedirs(root + path)
            yield path


def _files_of(path: str) -> Iterable[str]:
    if os.path.isfile(path):
        return [path]
    return [os.path.join(where, name) for where, _, names in os.walk(path) for name in names]


def _copy(path: str, root: str) -> None:
    os.makedirs(os.path.dirname(root + path), exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(root + path)
    shutil.copyfile(path, root + path)


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _environment() -> dict[str, str]:
    carried = {name: value for name, value in os.environ.items() if _VARIABLE.fullmatch(name)}
    carried |= {name: os.environ[name] for name in _HOW if name in os.environ}
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {**carried, "HOME": "/root", "LANG": "C.UTF-8", "PATH": path}


def _enter(root: str, bound: Iterable[str]) -> None:
    """Mount the kernel's file systems in a directory, and make it this process's root."""
    syscalls.unshare(syscalls.CLONE_NEWNS | syscalls.CLONE_NEWUTS | syscalls.CLONE_NEWIPC)
    syscalls.mount("none", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE)
    tree = syscalls.MS_BIND | syscalls.MS_REC
    syscalls.mount(root, root, "", syscalls.MS_BIND)
    for path in ("/dev", "/sys"):
        syscalls.mount(path, root + path, "", tree)
    syscalls.mount("proc", f"{root}/proc", "proc", 0)
    syscalls.mount("tmpfs", f"{root}/run", "tmpfs", 0, "mode=755")
    for path in bound:
        syscalls.mount(path, root + path, "", tree)
        syscalls.mount("none", root + path, "", tree | syscalls.MS_REMOUNT | syscalls.MS_RDONLY)
    os.chdir(root)
    syscalls.pivot_root_here()
    syscalls.mount("none", "/", "", syscalls.MS_REC | syscalls.MS_SHARED)
    os.chdir(_CLONE)


if __name__ == "__main__":
    sys.exit(main())
