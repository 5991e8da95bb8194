"""What a guest boots from and runs with, kept in the cache.

    DIR/vmlinux  initrd  disk.img    what the machine boots
    DIR/root/                        the files on the disk; its Python compiles for the guest
    DIR/kernel/                      the unpacked package
    DIR/tools/                       the packages that tests need
    DIR/site/                        those that the shim needs, and nothing else

Rules
- Each part is made anew when what it is made of has changed: a file beside it has the key. What
  the archive offers is no part of that; ``make clean`` forgets everything.
- A part that fails to be made leaves no key, and so counts as absent.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from tests.tools.stamps import read_stamp, write_stamp
from tests.tools.vm import disk, python, root
from tests.tools.vm.guests import Guest
from tests.tools.vm.kernel import Kernel

# The modules of this project, compiled for the guest where they are.
_ROOMS: Final = ("api", "hooks", "integration", "shim", "tests")


@dataclass(frozen=True, slots=True)
class Files:
    """Where the parts of a guest are."""

    guest: Guest  # whose
    directory: str  # of all parts

    @property
    def kernel(self) -> str:
        """The kernel's image, uncompressed."""
        return os.path.join(self.directory, "vmlinux")

    @property
    def initrd(self) -> str:
        """The initial root."""
        return os.path.join(self.directory, "initrd")

    @property
    def disk(self) -> str:
        """The disk, raw."""
        return os.path.join(self.directory, "disk.img")

    @property
    def tools(self) -> str:
        """Python packages for the tests."""
        return os.path.join(self.directory, "tools")

    @property
    def site(self) -> str:
        """Python packages for the shim."""
        return os.path.join(self.directory, "site")


def prepare(guest: Guest, cache: str, repository: str, *, say: Callable[[str], None]) -> Files:
    """Have a guest ready to be started; what is there already is not made again.

    Args:
        guest: which.
        cache: a directory of guests, made if missing.
        repository: the checkout whose requirements and modules it is for.
        say: told what takes time.

    Returns:
        Where everything is.

    Raises:
        VmError: a part could not be made.
        PackagesError: the kernel or the archive cannot be had.
    """
    files = Files(guest, os.path.join(os.path.abspath(cache), guest.name))
    os.makedirs(files.directory, exist_ok=True)
    with locked(files.directory, say=say):
        image_key = guest.key(root.recipe(), disk.recipe())
        if read_stamp(_key_file(files.directory, "image")) != image_key:
            _make_image(files, say)
            write_stamp(_key_file(files.directory, "image"), image_key)
        for name, requirements in (
            (files.tools, "requirements-dev.txt"),
            (files.site, "requirements.txt"),
        ):
            path = os.path.join(repository, requirements)
            with open(path, "rb") as file:
                key = guest.key(file.read())
            part = os.path.basename(name)
            if read_stamp(_key_file(files.directory, part)) != key:
                say(f"downloading Python packages for {guest.name}")
                shutil.rmtree(name, ignore_errors=True)
                python.install(guest, path, name)
                write_stamp(_key_file(files.directory, part), key)
        rooms = [os.path.join(repository, room) for room in _ROOMS]
        python.compile_modules(
            os.path.join(files.directory, "root"), [files.tools, files.site, *rooms]
        )
    return files


def _make_image(files: Files, say: Callable[[str], None]) -> None:
    guest, directory = files.guest, files.directory
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_key_file(directory, "image"))
    kernel = Kernel.fetch(guest, os.path.join(directory, "kernel"), say=say)
    installed = os.path.join(directory, "root")
    shutil.rmtree(installed, ignore_errors=True)
    to_boot = kernel.modules(disk.MODULES)
    root.build_root(
        guest,
        installed,
        modules={**to_boot, **kernel.modules(guest.modules)},
        version=kernel.version,
        builtin=os.path.join(kernel.directory, "lib/modules", kernel.version),
        say=say,
    )
    say(f"writing the disk of {guest.name}")
    with open(files.kernel, "wb") as file:
        file.write(kernel.image())
    busybox = os.path.join(installed, "usr/bin/busybox")
    if not os.path.exists(busybox):  # before the merge of /usr was done in packages
        busybox = os.path.join(installed, "bin/busybox")
    disk.build_initrd(files.initrd, busybox=busybox, modules=to_boot)
    disk.build_disk(files.disk, root=installed)


@contextlib.contextmanager
def locked(directory: str, *, say: Callable[[str], None]) -> Iterator[None]:
    """Hold a directory against other processes that make or run guests.

    Args:
        directory: it exists.
        say: told when it has to be waited for.
    """
    # A file of its own: the directory itself is locked by those who unpack packages into it.
    descriptor = os.open(os.path.join(directory, ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that uses {directory}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _key_file(directory: str, part: str) -> str:
    return os.path.join(directory, f"{part}.key")
