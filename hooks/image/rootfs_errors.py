"""The errors of an image's files: E03xx."""

from __future__ import annotations

from api.errors import Status
from hooks.errors import RootfsError


class PathRefused(
    RootfsError,
    code="NVSHIM-E0303",
    remedy="use a path that leads somewhere inside the image, or remove what is in its way",
):
    """A path leads nowhere inside the image: a dangling or cyclic link, ``..``, or a NUL.

    Raised by every write, and by reads whose path is itself malformed.
    """


class NotARegularFile(RootfsError, code="NVSHIM-E0304", remedy="remove it from the image"):
    """There is a directory, FIFO, socket or device where a regular file was expected."""


class FileTooLarge(
    RootfsError,
    code="NVSHIM-E0305",
    status=Status.RESOURCE_EXHAUSTED,
    remedy="remove it from the image, or make it smaller",
):
    """A file or directory of the image is too large."""


class DirectoryInTheWay(RootfsError, code="NVSHIM-E0309", remedy="remove it from the image"):
    """A directory is in the place of a file, a link or the mount point of a file."""


class MalformedElf(RootfsError, code="NVSHIM-E0310", remedy="put another file in its place"):
    """A file is not a supported ELF file, or its tables point outside the file."""


class MalformedCache(RootfsError, code="NVSHIM-E0311", remedy="run ldconfig in the image"):
    """A file is not an ld.so.cache of format glibc-ld.so.cache1.1 in little-endian order."""


# fmt: off
KernelTooOld = RootfsError.row("NVSHIM-E0301 kernel-too-old", Status.FAILED_PRECONDITION,
    "The kernel has no openat2(2), or a filter forbids it.",
    remedy="run Linux 5.6 or newer")
RootfsUnavailable = RootfsError.row("NVSHIM-E0302 rootfs-unavailable", Status.FAILED_PRECONDITION,
    "The directory that should hold the rootfs cannot be opened.",
    remedy="look whether its mounts were made")
RootfsBusy = RootfsError.row("NVSHIM-E0306 rootfs-busy", Status.ABORTED,
    "Other processes renamed or mounted so often that a path could not be resolved.",
    remedy="try again")
RootfsReadOnly = RootfsError.row("NVSHIM-E0307 rootfs-read-only", Status.FAILED_PRECONDITION,
    "A file system is read-only, and there is no other place for what has to be written.",
    remedy="use a writable snapshot")
RootfsIo = RootfsError.row("NVSHIM-E0308 rootfs-io", Status.INTERNAL,
    "The file system below the rootfs failed: no space, quota, I/O error, no permission.",
    remedy="look for room on its disk, and at the kernel's log (dmesg)")
DeviceDirectoryUnsafe = RootfsError.row(
    "NVSHIM-E0312 device-directory-unsafe", Status.FAILED_PRECONDITION,
    "The image's /dev is a link, and a runtime may create device nodes where it leads.",
    remedy="use an image with a directory there")
