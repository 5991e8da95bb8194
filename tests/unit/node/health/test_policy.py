"""The effect of each error on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hooks.config import Config, load_config
from hooks.errors import WrongConfigValue
from integration.agent_errors import NodeAgentError, XidListWrong
from integration.node.faults.policy import policy_of
from integration.node.faults.xids import NUMBERS, Severity, about
from shim.causes.xids import Remedy
from tests.harness.raising import is_error, raises

if TYPE_CHECKING:
    from pathlib import Path

IGNORE, SUSPECT = Severity.IGNORE, Severity.SUSPECT
UNHEALTHY, FATAL = Severity.UNHEALTHY, Severity.FATAL


@pytest.mark.parametrize(
    ("number", "severity"),
    [
        *((number, IGNORE) for number in (13, 31, 43, 45, 68)),  # like NVIDIA's device plugin
        (109, SUSPECT), (94, SUSPECT), (92, SUSPECT), (155, SUSPECT),
        (119, UNHEALTHY), (120, UNHEALTHY), (74, UNHEALTHY), (145, UNHEALTHY),
        (48, FATAL), (79, FATAL), (95, FATAL), (140, FATAL), (143, FATAL), (64, FATAL),
        (4711, UNHEALTHY),
    ],
)  # fmt: skip
def test_the_catalogue(number: int, severity: Severity) -> None:
    assert policy_of(Config(), "", "").severity(number) == severity


def test_each_number_is_there_once_and_says_what_to_do() -> None:
    every = [number for numbers in NUMBERS.values() for number in numbers]
    assert len(every) == len(set(every))
    for number in every:
        xid = about(number)
        assert xid.number == number
        assert xid.name
        assert xid.meaning
        if xid.severity != IGNORE:
            assert xid.remedy != Remedy.NOTHING
    assert about(4711).meaning == "unknown to this version"


@pytest.mark.parametrize(
    ("disabled", "enabled", "severities"),
    [
        ("79, 119", "", {79: IGNORE, 119: IGNORE, 95: FATAL}),
        ("XIDS", "", {79: IGNORE, 119: IGNORE, 4711: IGNORE}),
        ("xids", "119,79", {79: FATAL, 119: UNHEALTHY, 95: IGNORE}),
        ("", "31", {31: UNHEALTHY, 13: IGNORE}),
        ("31", "all", {31: UNHEALTHY, 13: UNHEALTHY, 79: FATAL}),
        (",,", " ", {31: IGNORE, 79: FATAL}),
    ],
)
def test_lists_as_nvidias_device_plugin_has_them(
    disabled: str, enabled: str, severities: dict[int, Severity]
) -> None:
    policy = policy_of(Config(), disabled, enabled)
    assert policy.judged
    assert {number: policy.severity(number) for number in severities} == severities


def test_all_of_them_disabled_judges_no_device() -> None:
    assert not policy_of(Config(), "all", "").judged
    assert policy_of(Config(), "all", "79").judged
    assert policy_of(Config(), "all", "79").severity(95) == IGNORE


@pytest.mark.parametrize("text", ["x", "79;31", "-1", "0", "79.0", "1" * 30, "²"])
def test_a_list_that_is_none_is_an_error(text: str) -> None:
    with raises(XidListWrong, match="is not an XID number"):
        policy_of(Config(), text, "")


def test_an_operators_table_is_weaker_than_the_lists(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[health]\nxids = ["31=fatal", "79=ignore", "31=suspect"]\nsuspects = 5\n')
    config = load_config(str(file))
    assert config.health_suspects == 5
    policy = policy_of(config, "", "79")
    assert policy.severity(31) == SUSPECT
    assert policy.severity(79) == UNHEALTHY
    assert policy_of(config, "31", "").severity(31) == IGNORE


@pytest.mark.parametrize(
    "line",
    ['xids = ["31=bad"]', 'xids = ["all=fatal"]', "suspects = 0", "quiet = 0", "window = 1e6"],
)
def test_a_value_that_is_none_is_an_error(tmp_path: Path, line: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f"[health]\n{line}\n")
    with pytest.raises(WrongConfigValue, match=r"in \[health\]"):
        load_config(str(file))


@given(st.text(max_size=20), st.text(max_size=20))
def test_every_text_is_a_list_or_an_error(disabled: str, enabled: str) -> None:
    try:
        policy = policy_of(Config(), disabled, enabled)
    except NodeAgentError as error:
        assert is_error(error, XidListWrong)  # noqa: PT017 - either outcome is right
        return
    assert all(policy.severity(number) in Severity for number in range(1, 300))
