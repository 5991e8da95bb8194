"""The module parameters and the application profile that a container sees."""

from __future__ import annotations

import json
import re

import pytest

from hooks.edits.planning import PATH, application_profile
from hooks.node.host_setup import (
    may_make_nodes,
    node_owner,
    parse_parameters,
    without_node_making,
)

PARAMETERS = 'ResmanDebugLevel: 4\nModifyDeviceFiles: 1\nDeviceFileMode: 438\nRmMsg: ""\n'


def test_parameters_are_shown_with_node_making_off_and_else_as_they_are() -> None:
    file = without_node_making(PARAMETERS)
    assert file is not None
    assert file.path == "/proc/driver/nvidia/params"
    assert file.content.decode() == PARAMETERS.replace("Files: 1", "Files: 0")


@pytest.mark.parametrize("text", ["", "ModifyDeviceFiles: 0\n", "DeviceFileMode: 438\n"])
def test_nothing_is_covered_where_nodes_are_not_made_anyway(text: str) -> None:
    assert without_node_making(text) is None


def test_nodes_may_be_made_unless_the_module_says_no() -> None:
    assert may_make_nodes({})
    assert may_make_nodes(parse_parameters(PARAMETERS))
    assert not may_make_nodes(parse_parameters("ModifyDeviceFiles: 0"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", (0o666, 0, 0)),
        ("DeviceFileMode: 432\nDeviceFileUID: 7\nDeviceFileGID: 44\n", (0o660, 7, 44)),
        ("DeviceFileMode: 4095\nDeviceFileUID: -1\nDeviceFileGID: 4294967295\n", (0o666, 0, 0)),
        ("DeviceFileMode: x\nDeviceFileUID: 99999999999999999999\n", (0o666, 0, 0)),
    ],
)
def test_owner_of_nodes_is_what_the_module_says_if_that_makes_sense(
    text: str, expected: tuple[int, int, int]
) -> None:
    assert node_owner(parse_parameters(text)) == expected


@pytest.mark.parametrize(
    ("minors", "mask"), [([0], 0x1), ([1, 3], 0xA), ([3, 3], 0x8), (range(64), 2**64 - 1)]
)
def test_profile_has_a_bit_for_each_gpu(minors: list[int], mask: int) -> None:
    profile = application_profile(minors)
    assert profile is not None
    assert profile.path == PATH
    # The driver's parser takes hexadecimal numbers, JSON's does not.
    text = re.sub(r"0x[0-9a-f]+", lambda number: str(int(number[0], 16)), profile.content.decode())
    settings = json.loads(text)
    assert settings["profiles"] == [
        {"name": "_container_", "settings": ["EGLVisibleDGPUDevices", mask]}
    ]
    assert settings["rules"] == [{"pattern": [], "profile": "_container_"}]


@pytest.mark.parametrize("minors", [[], [64], [0, 100]])
def test_no_profile_is_made_that_would_hide_what_was_granted(minors: list[int]) -> None:
    assert application_profile(minors) is None
