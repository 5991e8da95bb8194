"""Change the root of a spec's paths, as for a spec that a program in a container wrote.

Rules
- A path is below a root if it equals the root or continues with a slash: ``/run/driver-2/lib`` is
  not below ``/run/driver``. Other paths do not change.
- Host paths: ``hostPath`` of nodes and mounts, the programs of hooks, and the arguments of hooks
  that run on the host. The host path of a node without ``hostPath`` is its ``path``; it gets a
  ``hostPath`` if that changes.
- Container paths: ``path`` of nodes, ``containerPath`` of mounts, the arguments of hooks that run
  in the container (createContainer, startContainer), and the program of startContainer hooks.
- An argument ``TARGET::LINK`` is two paths, and ``--folder=PATH`` is one.

Source: NVIDIA Container Toolkit, ``nvidia-ctk cdi transform root``, with the same meaning; OCI
runtime specification, "POSIX-platform Hooks", for where a hook runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from hooks.cdi import files, schema
from hooks.cdi.spec import DeviceNode, Edits, SpecFile, SpecHook, SpecMount
from integration.cdi.errors import CdiInputUnreadable

HOST: Final = "host"
CONTAINER: Final = "container"
STDIN: Final = "-"

_INSIDE: Final = frozenset({"createContainer", "startContainer"})
_INSIDE_ROOT: Final = "startContainer"


def read_spec(path: str) -> SpecFile:
    """Read a spec.

    Args:
        path: the file; :data:`STDIN` for stdin.

    Raises:
        CdiInputUnreadable: the file does not exist, or stdin is too long.
        CdiFileUnusable: the file is not root's, not a file, or too long.
        CdiSpecInvalid: the spec violates the specification.
    """
    if path == STDIN:
        data = sys.stdin.buffer.read(files.LARGEST + 1)
        if len(data) > files.LARGEST:
            raise CdiInputUnreadable(
                "the CDI spec on stdin", found=f"it is longer than {files.LARGEST >> 20} MiB"
            )
        return schema.parse(files.tree_of(data, "stdin"), "stdin")
    content = files.read(path)
    if content is None:
        raise CdiInputUnreadable(
            f"the CDI spec {path}", found="no such file", do="name a spec file, or - for stdin"
        )
    return schema.parse(files.tree_of(content.data, path), path)


def transform_root(spec: SpecFile, *, old: str, new: str, relative_to: str) -> SpecFile:
    """Return a spec with its paths below another root.

    Args:
        spec: the spec to change.
        old: the present root.
        new: the new root; "" and "/" mean the same.
        relative_to: :data:`HOST` or :data:`CONTAINER`, for their paths.

    Returns:
        The new spec. It has the old version, or a later one if its content needs that.
    """
    move = _mover(old, new)
    edit = _of_host if relative_to == HOST else _of_container

    def edited(edits: Edits) -> Edits:
        return edit(edits, move)

    moved = replace(
        spec,
        edits=edited(spec.edits),
        devices=tuple(replace(device, edits=edited(device.edits)) for device in spec.devices),
    )
    tree = schema.to_tree(moved)
    least = schema.minimum_version(tree)  # a node's hostPath needs a later version
    version = max(spec.version, least, key=_number)
    return schema.parse({**tree, "cdiVersion": version}, "of the result")


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.removeprefix("v").split("."))


def _mover(old: str, new: str) -> Callable[[str], str]:
    old, new = old.rstrip("/"), new.rstrip("/")

    def move(path: str) -> str:
        if path.startswith(f"{old}/"):
            return new + path.removeprefix(old)
        return (new or "/") if path == old else path

    return move


def _of_host(edits: Edits, move: Callable[[str], str]) -> Edits:
    def node(each: DeviceNode) -> DeviceNode:
        before = each.host_path or each.path
        after = move(before)
        return each if after == before else replace(each, host_path=after)

    def mount(each: SpecMount) -> SpecMount:
        return replace(each, host_path=move(each.host_path))

    def hook(each: SpecHook) -> SpecHook:
        path = each.path if each.name == _INSIDE_ROOT else move(each.path)
        args = each.args if each.name in _INSIDE else _moved(each.args, move)
        return replace(each, path=path, args=args)

    return _mapped(edits, node, mount, hook)


def _of_container(edits: Edits, move: Callable[[str], str]) -> Edits:
    def node(each: DeviceNode) -> DeviceNode:
        # Its path on the host does not change.
        after = move(each.path)
        host = each.host_path or ("" if after == each.path else each.path)
        return replace(each, path=after, host_path=host)

    def mount(each: SpecMount) -> SpecMount:
        return replace(each, container_path=move(each.container_path))

    def hook(each: SpecHook) -> SpecHook:
        path = move(each.path) if each.name == _INSIDE_ROOT else each.path
        args = _moved(each.args, move) if each.name in _INSIDE else each.args
        return replace(each, path=path, args=args)

    return _mapped(edits, node, mount, hook)


def _mapped(
    edits: Edits,
    node: Callable[[DeviceNode], DeviceNode],
    mount: Callable[[SpecMount], SpecMount],
    hook: Callable[[SpecHook], SpecHook],
) -> Edits:
    return replace(
        edits,
        device_nodes=tuple(map(node, edits.device_nodes)),
        mounts=tuple(map(mount, edits.mounts)),
        hooks=tuple(map(hook, edits.hooks)),
    )


def _moved(arguments: tuple[str, ...], move: Callable[[str], str]) -> tuple[str, ...]:
    def argument(text: str) -> str:
        option, equals, value = text.partition("=")
        if text.startswith("--") and equals:
            return f"{option}={argument(value)}"
        return "::".join(move(part) for part in text.split("::", 1))

    return tuple(map(argument, arguments))
