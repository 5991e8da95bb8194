"""The engine's errors: the branches that :mod:`api.errors` draws, and their leaves.

Each leaf says in its docstring when it is raised and by whom. Codes are never reused.
"""

from __future__ import annotations

from api.errors import NvshimError, Status

__all__ = ["ConfigError", "InventoryError", "RequestError", "RootfsError", "SpecError"]


class InventoryError(NvshimError):
    """Something about this node's driver or GPUs."""

    code = "NVSHIM-E0100"
    status = Status.FAILED_PRECONDITION


class RequestError(NvshimError):
    """Something about what the container asks for."""

    code = "NVSHIM-E0200"
    status = Status.INVALID_ARGUMENT


class RootfsError(NvshimError):
    """Something about the image's files."""

    code = "NVSHIM-E0300"
    status = Status.FAILED_PRECONDITION


class SpecError(NvshimError):
    """Something about the OCI spec, or a mutation of it that must not leave the engine."""

    code = "NVSHIM-E0400"
    status = Status.INVALID_ARGUMENT


class ConfigError(NvshimError):
    """Something about our own configuration."""

    code = "NVSHIM-E0500"
    status = Status.FAILED_PRECONDITION
