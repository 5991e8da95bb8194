"""Decide, once for each container, whether the engine has any work for it.

Every container of the node passes through here. Most request nothing, so the engine is not even
loaded for them. A worker gets the result with its container, reads the request with
:mod:`hooks.requests.request`, and repeats none of these checks.

Rules
- ``requests`` is true exactly if the parsed request needs an injection, or if parsing raises: both
  use the table of :mod:`hooks.requests.places`.
- If the spec has one of NVIDIA's hooks, the engine has work (:mod:`hooks.requests.oci_hooks`), even
  if the container requests nothing.
- Device nodes that a spec already lists matter only if the configuration limits their number of
  holders, or if a device of the node is out of service.
- The configuration can name more variables and annotations. If it cannot be read, the default
  places apply, and the failure is reported; a container that requests something then fails.
- The annotation :data:`FAULT_EXIT_CODE` sets a container's exit code if a GPU failure ends it. It
  affects only that container, so anyone who may annotate it may set it.

Source: OCI runtime specification, config.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from api.errors import NvshimError
from api.values import dataclass
from hooks.config import Config, Holders, find_files, load_config
from hooks.errors import ConfigError, FaultExitCodeWrong
from hooks.named_files import read_named
from hooks.requests.oci_hooks import calls_of
from hooks.requests.places import (
    AMD_DEVICES,
    CAPABILITIES,
    GPU_NODES,
    INTEL_DEVICES,
    NODES,
    SpecView,
    device_texts,
    vendor_text,
)

# Driver capabilities that a container gets by default.
_DEFAULT_CAPABILITIES: Final = frozenset({"", "compute", "utility"})
# Not included in the CDI specs of NVIDIA's program, which have hooks.
_BEYOND_NVIDIAS: Final = frozenset({"all", "compat32"})

FAULT_EXIT_CODE: Final = "io.containerd.nvidia.v1.fault-exit-code"
"""An annotation, which takes precedence over the node's configuration."""
_LARGEST_CODE: Final = 255
_DIGITS: Final = 3


@dataclass(frozen=True, slots=True)
class Settings:
    """The part of the configuration that the prefilter needs."""

    config: Config = Config()  # the default, if it cannot be read
    failure: str = ""  # why it cannot be read, or ""
    limited: bool = False  # whether it may limit the holders of a device


@dataclass(frozen=True, slots=True)
class Prefilter:
    """The prefilter's findings in a container's spec."""

    requests: bool  # whether it requests something, or its request cannot be read
    lists_nodes: bool  # whether its spec already lists NVIDIA's device nodes
    wants_more: bool  # whether it also names driver capabilities beyond those of the nodes
    counts_nodes: bool  # whether these nodes count as held, since their holders may be limited
    needs_worker: bool  # whether a worker must examine it, for any of these reasons or another
    failure: str = ""  # why the configuration cannot be read, if this may affect the container


def prefilter(spec: Mapping[str, Any]) -> Prefilter:
    """Examine a container's spec.

    Args:
        spec: config.json, decoded.

    Raises:
        FaultExitCodeWrong: the annotation does not hold an exit code.
    """
    found = find_work(spec, read_settings())
    if found.needs_worker or found.lists_nodes:
        # Check it now: when the container exits, an error would come too late.
        read_fault_exit_code(spec)
    return found


def find_work(spec: Mapping[str, Any], settings: Settings) -> Prefilter:
    """Examine a container's spec, with settings already read.

    Args:
        spec: config.json, decoded.
    """
    listed = lists_nodes(spec)
    counted = listed and settings.limited
    try:
        view = SpecView.of(spec)
        requests = _requests(view, settings.config)
        wants_more = listed and _names_more(view)
    except NvshimError:  # reading the request raises it again, and that is reported
        requests, wants_more = True, False
    needs_worker = (
        requests
        or wants_more
        or counted
        or (listed and os.path.lexists(settings.config.drained))
        or _lists_gpus_for_mapped_users(spec)
    )
    failure = "" if requests else settings.failure
    return Prefilter(requests, listed, wants_more, counted, needs_worker, failure)


def _requests(view: SpecView, config: Config) -> bool:
    """Whether anything is requested.

    The first place decides, unless it names only other vendors' devices, which is also a request.
    """
    text = next(device_texts(view, config), None)
    return (
        view.hooks.present
        or (text is not None and not text.is_empty)
        or any(vendor_text(view.variables, name) for name in (AMD_DEVICES, INTEL_DEVICES))
    )


def _names_more(view: SpecView) -> bool:
    """Whether a container names driver capabilities beyond those that came with its listed nodes.

    An engine gives every image the whole CDI spec, so the specs of our device plugin contain only
    the files of the usual capabilities, and we add the others that an image names. The specs of
    NVIDIA's program, which have hooks, contain all files except 32-bit ones.
    """
    named = {word.strip() for word in view.variables.get(CAPABILITIES, "").split(",")}
    beyond = named - _DEFAULT_CAPABILITIES
    if beyond and calls_of(view.spec):
        beyond &= _BEYOND_NVIDIAS
    return bool(beyond)


def lists_nodes(spec: Mapping[str, Any]) -> bool:
    """Whether a spec already lists NVIDIA's device nodes, for example from CDI.

    Args:
        spec: config.json, decoded; a malformed one lists none.
    """
    try:
        return any(node["path"].startswith(NODES) for node in spec["linux"].get("devices") or ())
    except (AttributeError, KeyError, TypeError):
        return False


def _lists_gpus_for_mapped_users(spec: Mapping[str, Any]) -> bool:
    """Whether a spec lists any vendor's GPU nodes for a container in a user namespace."""
    try:
        linux = spec["linux"]
        return bool(linux.get("uidMappings")) and any(
            node["path"].startswith(GPU_NODES) for node in linux.get("devices") or ()
        )
    except (AttributeError, KeyError, TypeError):
        return False


def read_settings() -> Settings:
    """Read the configuration; if that fails, return the default and the reason."""
    try:
        config = load_config()
    except ConfigError as error:
        return Settings(failure=str(error), limited=_mentions_limits())
    return Settings(config, limited=config.holders != Holders.ANY or bool(config.holders_of))


def _mentions_limits() -> bool:
    """Whether an unreadable configuration may limit the holders of a device."""
    (ours, _), _ = find_files()
    try:
        return b"holders" in read_named(ours)
    except OSError:
        return False


def read_fault_exit_code(spec: Mapping[str, Any]) -> int | None:
    """Read the exit code that a container requests for the case that a GPU failure ends it.

    Args:
        spec: config.json, decoded.

    Returns:
        1 to 255; 0 to keep its own; None without the annotation.

    Raises:
        FaultExitCodeWrong: the annotation holds something else.
    """
    annotations = spec.get("annotations")
    if not isinstance(annotations, dict) or FAULT_EXIT_CODE not in annotations:
        return None
    value = annotations[FAULT_EXIT_CODE]
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= _DIGITS:
        code = int(value)
        if code <= _LARGEST_CODE:
            return code
    raise FaultExitCodeWrong(
        f"annotation {FAULT_EXIT_CODE}",
        found=f"{value!r}",
        do="write an exit code, 1 to 255, or 0 for the container's own",
    )
