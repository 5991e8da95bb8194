"""The parameters of the kernel module, and what of them a container is shown.

/proc/driver/nvidia/params has a line ``Name: value`` for each. Those that matter here say who
makes device nodes: NVIDIA's libraries, through nvidia-modprobe or by themselves, make those
that they miss, with ``DeviceFileMode``, ``DeviceFileUID`` and ``DeviceFileGID``, unless
``ModifyDeviceFiles`` is 0.

In a container they must not: a privileged one, or one whose process may make nodes, would
get a node for every GPU of the machine as soon as a CUDA program starts in it. So where the
module says 1, the container reads the same file with 0 in it, read-only
(:mod:`shim.proc_cover` mounts it).

The other files below /proc/driver/nvidia stay as they are. NVIDIA's older tool hid the
directories of GPUs that were not granted (``gpus/BDF``) below a tmpfs over all of
/proc/driver/nvidia; its present one does not, nor does this: they give no access, a
container sees the same GPUs and more of them below /sys/bus/pci/devices, and what is mounted over
a directory of procfs hides whatever the module puts there later (capabilities of MIG devices
that are made while the container runs).

Source: kernel-open/nvidia/nv-procfs.c of NVIDIA's open kernel modules; nvidia-modprobe-utils.c
of nvidia-modprobe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hooks.edits.plan import ProcFile

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["PATH", "may_make_nodes", "node_owner", "parse_parameters", "without_node_making"]

PATH: Final = "/proc/driver/nvidia/params"

_MODIFY: Final = "ModifyDeviceFiles"
_MODE, _UID, _GID = "DeviceFileMode", "DeviceFileUID", "DeviceFileGID"
_DEFAULT_MODE: Final = 0o666
_PERMISSIONS: Final = 0o777
_MOST_ID: Final = 2**32 - 2


def parse_parameters(text: str) -> dict[str, str]:
    """The parameters by name; a line without a colon is none."""
    lines = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in lines if colon}


def may_make_nodes(parameters: Mapping[str, str]) -> bool:
    """Whether others than the administrator may make the driver's nodes; so it is by default."""
    return parameters.get(_MODIFY, "1") != "0"


def node_owner(parameters: Mapping[str, str]) -> tuple[int, int, int]:
    """Permission bits, owner and group of the nodes that are to be made."""
    mode = _number(parameters, _MODE, _DEFAULT_MODE)
    return (
        mode if mode <= _PERMISSIONS else _DEFAULT_MODE,
        _number(parameters, _UID, 0),
        _number(parameters, _GID, 0),
    )


def without_node_making(text: str) -> ProcFile | None:
    """What a container is to read in place of the parameters.

    Args:
        text: the file's content; "" if there is none.

    Returns:
        The file to be covered; None if it says already that nodes are not to be made.
    """
    lines = text.splitlines(keepends=True)
    shown = [_MODIFY_NOT if _is_modify(line) else line for line in lines]
    if shown == lines:
        return None
    return ProcFile(PATH, "".join(shown).encode(), "keeps the driver from making nodes")


_MODIFY_NOT: Final = f"{_MODIFY}: 0\n"


def _is_modify(line: str) -> bool:
    name, _, value = line.partition(":")
    return name.strip() == _MODIFY and value.strip() != "0"


def _number(parameters: Mapping[str, str], name: str, otherwise: int) -> int:
    text = parameters.get(name, "")
    number = (
        int(text)
        if text.isascii() and text.isdecimal() and len(text) <= len("4294967295")
        else otherwise
    )
    return number if number <= _MOST_ID else otherwise
