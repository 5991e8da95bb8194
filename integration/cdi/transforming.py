"""The same spec for another root: as a program in a container has written it, for its host.

Rules
- A path begins with a root if it is the root or goes on with a slash after it: ``/run/driver``
  is no root of ``/run/driver-2/lib``. What does not begin with it stays.
- Of the host are: ``hostPath`` of nodes and mounts, the programs of hooks, and the arguments of
  hooks, but for the hooks that run in the container. A node without a ``hostPath`` has that of
  its ``path``, and is given one if it changes.
- Of the container are: ``path`` of nodes, ``containerPath`` of mounts, and arguments of the hooks
  that run in the container (createContainer, startContainer), and the program of the last.
- An argument ``TARGET::LINK`` is two paths, and ``--folder=PATH`` is one.

Source: NVIDIA Container Toolkit, ``nvidia-ctk cdi transform root``, whose meaning this has; OCI
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
    """A spec that a person names.

    Args:
        path: the file; :data:`STDIN` for what comes on stdin.

    Raises:
        CdiInputUnreadable: there is no such file, or stdin gives too much.
        CdiFileUnusable: it is no file of root's, or too long.
        CdiSpecInvalid: it breaks a rule of the specification.
    """
    if path == STDIN:
        data = sys.stdin.buffer.read(files.LARGEST + 1)
        if len(data) > files.LARGEST:
            raise CdiInputUnreadable(
                "the CDI spec of stdin", found=f"it is longer than {files.LARGEST >> 20} MiB"
            )
        return schema.parse(files.tree_of(data, "stdin"), "stdin")
    content = files.read(path)
    if content is None:
        raise CdiInputUnreadable(
            f"the CDI spec {path}", found="no such file", do="name a spec file, or - for stdin"
        )
    return schema.parse(files.tree_of(content.data, path), path)


def transform_root(spec: SpecFile, *, old: str, new: str, relative_to: str) -> SpecFile:
    """A spec whose paths are below another root.

    Args:
        spec: what it was made of.
        old: the root that paths begin with.
        new: the root that they are to begin with; "" and "/" mean the same.
        relative_to: :data:`HOST` or :data:`CONTAINER`, whose paths are meant.

    Returns:
        The spec, of the lowest version that has all that it uses, and of its own at least.
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
    least = schema.minimum_version(tree)  # hostPath of a node is younger than specs are
    version = max(spec.version, least, key=_number)
    return schema.parse({**tree, "cdiVersion": version}, "that is being made")


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
        # Where it is on the host stays as it was.
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
