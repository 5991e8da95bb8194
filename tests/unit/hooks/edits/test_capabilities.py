"""The table of driver files, compared with the files of real drivers."""

from __future__ import annotations

import os
import re
from typing import Final

import pytest

from hooks.node.capabilities import (
    FILES,
    OTHERS,
    Library,
    Socket,
    XorgModule,
    every_row,
    rows_of,
)
from hooks.node.capabilities import LEFT_OUT as PATTERNS_LEFT_OUT
from hooks.words import CAPABILITIES, Capability
from integration.simulated.packages import default_cache

LEFT_OUT: Final = {name.partition(".so")[0] for name in PATTERNS_LEFT_OUT}

# The versioned libraries of two installed driver branches.
OF_575: Final = [
    "libEGL_nvidia",
    "libGLESv1_CM_nvidia",
    "libGLESv2_nvidia",
    "libGLX_nvidia",
    "libcuda",
    "libcudadebugger",
    "libnvcuvid",
    "libnvidia-allocator",
    "libnvidia-cfg",
    "libnvidia-eglcore",
    "libnvidia-encode",
    "libnvidia-fbc",
    "libnvidia-glcore",
    "libnvidia-glsi",
    "libnvidia-glvkspirv",
    "libnvidia-gpucomp",
    "libnvidia-gtk2",
    "libnvidia-gtk3",
    "libnvidia-ml",
    "libnvidia-ngx",
    "libnvidia-nvvm",
    "libnvidia-opencl",
    "libnvidia-opticalflow",
    "libnvidia-pkcs11",
    "libnvidia-pkcs11-openssl3",
    "libnvidia-present",
    "libnvidia-ptxjitcompiler",
    "libnvidia-rtcore",
    "libnvidia-sandboxutils",
    "libnvidia-tls",
    "libnvidia-vksc-core",
    "libnvidia-wayland-client",
    "libnvoptix",
    "libvdpau_nvidia",
]
OF_595: Final = [
    "libnvidia-nscq",
    "libnvidia-nvvm",
    "libnvidia-pkcs11-openssl3",
    "libnvidia-ptxjitcompiler",
    "libnvidia-sandboxutils",
    "libnvidia-tileiras",
]


def stems() -> set[str]:
    """Return the names of the table's libraries, without ``.so.VERSION``."""
    rows = [row for row in every_row() if isinstance(row, Library | XorgModule)]
    return {row.name.partition(".so")[0] for row in rows}


@pytest.mark.parametrize("names", [OF_575, OF_595])
def test_every_library_of_a_driver_is_in_the_table_or_left_out_by_name(
    names: tuple[str, ...],
) -> None:
    assert set(names) - LEFT_OUT <= stems()
    assert not LEFT_OUT & stems()


def test_every_library_of_the_real_driver_is_in_the_table() -> None:
    directory = os.path.join(default_cache(), "unpacked/nvidia-driver/usr/lib")
    if not os.path.isdir(directory):
        pytest.skip("the driver's packages are not here")
    version = re.compile(r"(lib[\w-]+)\.so\.\d{3}\.\d+(?:\.\d+)?")
    found = {
        match[1]
        for _, _, files in os.walk(directory)
        for name in files
        if (match := version.fullmatch(name))
    }
    assert len(found) > 20
    assert found <= stems() | LEFT_OUT


@pytest.mark.parametrize(
    ("capabilities", "has_others"),
    [
        (CAPABILITIES, True),
        (CAPABILITIES - {Capability.COMPAT32}, True),
        (CAPABILITIES - {Capability.NGX}, False),
        ({Capability.COMPUTE, Capability.UTILITY}, False),
    ],
)
def test_libraries_of_no_capability_come_with_all(
    capabilities: set[str], *, has_others: bool
) -> None:
    assert (OTHERS in rows_of(capabilities)) is has_others


def test_pipes_of_mps_are_the_only_directory_and_come_with_cuda() -> None:
    sockets = {row.path: row for row in every_row() if isinstance(row, Socket)}
    assert [path for path, row in sockets.items() if row.is_directory] == ["/tmp/nvidia-mps"]
    assert sockets["/tmp/nvidia-mps"] in FILES[Capability.COMPUTE]
    assert sockets["/run/nvidia-persistenced/socket"] in FILES[Capability.UTILITY]
    assert sockets["/run/nvidia-fabricmanager/socket"] in FILES[Capability.UTILITY]
