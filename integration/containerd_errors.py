"""What can go wrong with a containerd of our own and the images made for it.

Leaves of the tree in :mod:`api.errors`, beside those in :mod:`integration.errors`::

    IntegrationError
    ├── ContainerdError             E22xx  a private containerd
    │   ├── ContainerdNotInstalled  E2201
    │   ├── ContainerdExited        E2202
    │   ├── ContainerdNotReady      E2203
    │   ├── CtrFailed               E2204
    │   ├── CtrTimeout              E2205
    │   └── CleanupIncomplete       E2206
    ├── ImagesError                 E23xx  images made of the host's files
    │   ├── SourceNotInstalled      E2301
    │   └── ImageBuildFailed        E2302
    ├── ProgramNotAdapted           E2402  programs of another release
    └── CriuUnusable                E2403  no CRIU for this kernel
"""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class ContainerdError(IntegrationError):
    """Base of what a private containerd raises."""


class ContainerdNotInstalled(ContainerdError):
    """A program that a private containerd is made of is not on the path."""

    code = "NVSHIM-E2201"
    status = Status.FAILED_PRECONDITION


class ContainerdExited(ContainerdError):
    """containerd ended while it was to run, most often at its start."""

    code = "NVSHIM-E2202"
    status = Status.UNAVAILABLE


class ContainerdNotReady(ContainerdError):
    """containerd runs and does not answer in time."""

    code = "NVSHIM-E2203"
    status = Status.DEADLINE_EXCEEDED


class CtrFailed(ContainerdError):
    """``ctr`` ended with another code than 0. The message quotes what it said."""

    code = "NVSHIM-E2204"
    status = Status.UNKNOWN


class CtrTimeout(ContainerdError):
    """``ctr`` did not end in time, and was killed."""

    code = "NVSHIM-E2205"
    status = Status.DEADLINE_EXCEEDED


class CleanupIncomplete(ContainerdError):
    """Something of a private containerd could not be removed; the message lists it."""

    code = "NVSHIM-E2206"
    status = Status.INTERNAL


class ImagesError(IntegrationError):
    """Base of what can go wrong while an image is made."""


class SourceNotInstalled(ImagesError):
    """A program or library that an image is made of is not on this machine."""

    code = "NVSHIM-E2301"
    status = Status.FAILED_PRECONDITION


class ImageBuildFailed(ImagesError):
    """The compiler, or ldconfig, refused what the image needs."""

    code = "NVSHIM-E2302"
    status = Status.INTERNAL


class ProgramNotAdapted(IntegrationError):
    """A program of another release could not be made to run beside its own libraries."""

    code = "NVSHIM-E2402"
    status = Status.FAILED_PRECONDITION


class CriuUnusable(IntegrationError):
    """No CRIU at hand works with this kernel. Raised by :func:`integration.criu.find_criu`."""

    code = "NVSHIM-E2403"
    status = Status.FAILED_PRECONDITION
