"""The leaves of :class:`hooks.errors.RootfsError`.

::

    RootfsError
    ├── KernelTooOld        E0301  openat2(2) does not exist
    ├── RootfsUnavailable   E0302  the directory of the rootfs cannot be opened
    ├── PathRefused         E0303  the path leads nowhere inside the image
    ├── NotARegularFile     E0304  a directory, FIFO, socket or device where a file belongs
    ├── FileTooLarge        E0305  longer than any honest file
    ├── RootfsBusy          E0306  a process kept renaming what was being resolved
    ├── RootfsReadOnly      E0307  a write met a read-only file system
    ├── RootfsIo            E0308  the file system failed: no space, I/O error, …
    ├── DirectoryInTheWay   E0309  a directory where a file or a link has to be
    ├── MalformedElf        E0310  not an ELF file, or one that contradicts itself
    ├── MalformedCache      E0311  not an ld.so.cache of glibc's format 1.1
    └── DeviceDirectoryUnsafe  E0312  /dev is a link and cannot be made a directory
"""

from __future__ import annotations

from api.errors import Status
from hooks.errors import RootfsError


class KernelTooOld(RootfsError):
    """The kernel has no openat2(2), or a filter forbids it. Raised when a rootfs is opened."""

    code = "NVSHIM-E0301"
    remedy = "run Linux 5.6 or newer"


class RootfsUnavailable(RootfsError):
    """The directory that should hold the rootfs cannot be opened. Raised by ``Rootfs.open``."""

    code = "NVSHIM-E0302"
    remedy = "look whether its mounts were made"


class PathRefused(RootfsError):
    """A path that leads nowhere inside the image: a dangling or cyclic link, ``..``, a NUL.

    Raised by every write, and by reads whose path is itself malformed.
    """

    code = "NVSHIM-E0303"
    remedy = "use a path that leads somewhere inside the image, or remove what is in its way"


class NotARegularFile(RootfsError):
    """A directory, FIFO, socket or device where a regular file was expected."""

    code = "NVSHIM-E0304"
    remedy = "remove it from the image"


class FileTooLarge(RootfsError):
    """A file or directory of the image is larger than its kind may be."""

    code = "NVSHIM-E0305"
    status = Status.RESOURCE_EXHAUSTED
    remedy = "remove it from the image, or make it smaller"


class RootfsBusy(RootfsError):
    """Renames or mounts raced with path resolution until patience ran out."""

    code = "NVSHIM-E0306"
    status = Status.ABORTED
    remedy = "try again"


class RootfsReadOnly(RootfsError):
    """A write met a read-only file system, and nothing else could take its place."""

    code = "NVSHIM-E0307"
    remedy = "use a writable snapshot"


class RootfsIo(RootfsError):
    """The file system below the rootfs failed: no space, quota, I/O error, no permission."""

    code = "NVSHIM-E0308"
    status = Status.INTERNAL
    remedy = "look for room on its disk, and at the kernel's log (dmesg)"


class DirectoryInTheWay(RootfsError):
    """A directory stands where a file, a link or a mount point of a file has to be."""

    code = "NVSHIM-E0309"
    remedy = "remove it from the image"


class MalformedElf(RootfsError):
    """Not an ELF file of a known shape, or one whose tables point outside of it."""

    code = "NVSHIM-E0310"
    remedy = "put another file in its place"


class MalformedCache(RootfsError):
    """Not an ld.so.cache of format glibc-ld.so.cache1.1 for a little-endian machine."""

    code = "NVSHIM-E0311"
    remedy = "run ldconfig in the image"


class DeviceDirectoryUnsafe(RootfsError):
    """The image's /dev is a link, and a runtime may make device nodes where it leads."""

    code = "NVSHIM-E0312"
    remedy = "use an image with a directory there"
