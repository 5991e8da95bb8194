"""Files of MIG layouts: parsing, and each rule that a file can break."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pytest

from integration.mig.errors import LayoutUnknown, MigConfigInvalid
from integration.mig.format import DeviceFilter, Entry, choose, read_layouts
from integration.mig.profiles import ProfileName
from tests.harness.raising import raises

if TYPE_CHECKING:
    from pathlib import Path

# Like the operator's default file, but shorter.
GOOD: Final = """
version: v1
mig-configs:
  all-disabled:
  - devices: all
    mig-enabled: false
  mixed:
  # the last entry counts
  - devices: all
    mig-enabled: true
    mig-devices: {}
  - device-filter: ["0x233010DE", "0x20B210DE:0x146310DE"]
    devices: [0, 1, 0x2]
    mig-enabled: true
    mig-devices:
      "1g.10gb": 2
      "1c.3g.40gb": 1
      "1g.10gb+me": 0
"""


def read(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "layouts.yaml"
    path.write_text(text)
    return read_layouts(str(path))


def entry(**change: Any) -> str:
    """Return a file with one entry, in JSON; a value of ... omits a field."""
    fields = {"devices": "all", "mig-enabled": True, "mig-devices": {"1g.10gb": 1}} | change
    kept = {name: value for name, value in fields.items() if value is not ...}
    return json.dumps({"version": "v1", "mig-configs": {"one": [kept]}})


def test_a_file_of_mig_parted_is_read(tmp_path: Path) -> None:
    layouts = read(tmp_path, GOOD.replace("0x2]", "2]"))
    assert [*layouts] == ["all-disabled", "mixed"]
    assert layouts["all-disabled"].entries == (Entry((), None, enabled=False, counts={}),)
    last = layouts["mixed"].entries[-1]
    assert last.filters == (DeviceFilter(0x233010DE), DeviceFilter(0x20B210DE, 0x146310DE))
    assert last.indices == frozenset({0, 1, 2})
    assert last.counts == {ProfileName(1, 1, 10): 2, ProfileName(3, 1, 40): 1}


def test_json_is_read_like_yaml(tmp_path: Path) -> None:
    (layout,) = read(tmp_path, entry(devices=[3])).values()
    assert layout.entries == (Entry((), frozenset({3}), True, {ProfileName(1, 1, 10): 1}),)


@pytest.mark.parametrize(
    ("index", "device", "subsystem", "which"),
    [
        (0, 0x233010DE, 0, 1),
        (2, 0x20B210DE, 0x146310DE, 1),
        (2, 0x20B210DE, 0x146410DE, 0),
        (3, 0x233010DE, 0, 0),
        (0, 0x20B010DE, 0, 0),
    ],
)
def test_the_last_entry_that_matches_a_gpu_counts(
    tmp_path: Path, index: int, device: int, subsystem: int, which: int
) -> None:
    layout = read(tmp_path, GOOD.replace("0x2]", "2]"))["mixed"]
    assert layout.entry_for(index, device, subsystem) is layout.entries[which]


@pytest.mark.parametrize(("word", "enabled"), [("True", True), ("on", True), ("NO", False)])
def test_truth_values_are_those_of_mig_parteds_yaml(
    tmp_path: Path, word: str, enabled: bool
) -> None:
    text = entry(**{"mig-devices": {}}).replace("true", word)
    (layout,) = read(tmp_path, text).values()
    assert layout.entries[0].enabled is enabled


def test_a_gpu_in_no_entry_has_none(tmp_path: Path) -> None:
    (layout,) = read(tmp_path, entry(devices=[3])).values()
    assert layout.entry_for(2, 0, 0) is None


@pytest.mark.parametrize(
    "change",
    [
        {"device-filter": ""},
        {"device-filter": []},
        {"device-filter": "0x233010DE"},
        {"device-filter": "590352606"},
        {"devices": []},
        {"mig-devices": {}},
        {"mig-enabled": False, "mig-devices": ...},
        {"mig-enabled": False, "mig-devices": {}},
        {"mig-devices": {"1g.10gb": 0, "7g.80gb": 1}},
        {"mig-devices": {"1g.10gb+me.all": 1, "1g.10gb-me": 1, "1g.10gb+gfx,me": 1}},
    ],
)
def test_these_are_allowed(tmp_path: Path, change: dict[str, Any]) -> None:
    assert read(tmp_path, entry(**change))


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "it is not an object"),
        ("- 1", "it is not an object"),
        ("version: v1\nversion: v1", "not valid YAML|twice"),
        ("version: [v1", "not valid YAML"),
        ("mig-configs: {a: [{devices: all, mig-enabled: false}]}", "version: it is missing"),
        ("version: v2\nmig-configs: {}", "version: it is v2, and not v1"),
        ("version: v1", "mig-configs: it is missing"),
        ("version: v1\nmig-configs: {}", "mig-configs: it is not an object with one or more"),
        ("version: v1\nmig-configs: []", "mig-configs: it is not an object"),
        ("version: v1\nmig-configs: {a: []}", "mig-configs.a: it is not a list with one or more"),
        ("version: v1\nmig-configs: {a: {}}", "mig-configs.a: it is not a list"),
        ("version: v1\nmig-configs: {a: [1]}", r"mig-configs.a\[0\]: it is not an object"),
        ("version: v1\nmig-configs: {}\nmore: 1", "more: the field is unknown"),
        (entry(more=1), r"mig-configs.one\[0\].more: the field is unknown"),
        (entry(devices=...), r"one\[0\].devices: it is missing"),
        (entry(devices="some"), r"one\[0\].devices: it is not `all` or"),
        (entry(devices=[-1]), r"one\[0\].devices: it is not a whole number"),
        (entry(devices=["0"]), r"one\[0\].devices: it is not a whole number"),
        (entry(devices=[True]), r"one\[0\].devices: it is not a whole number"),
        (entry(**{"mig-enabled": ...}), r"one\[0\].mig-enabled: it is missing"),
        (entry(**{"mig-enabled": "true"}), r"one\[0\].mig-enabled: it is not true or false"),
        (entry(**{"mig-devices": ...}), r"one\[0\].mig-devices: it is missing, though"),
        (entry(**{"mig-devices": []}), r"one\[0\].mig-devices: it is not an object"),
        (entry(**{"mig-enabled": False}), r"one\[0\].mig-devices: there cannot be any"),
        (entry(**{"mig-devices": {"1g.10gb": 0}}), r"one\[0\].mig-devices: all counts are 0"),
        (entry(**{"mig-devices": {"1g.10gb": -1}}), r"mig-devices.1g.10gb: it is not a whole"),
        (entry(**{"mig-devices": {"1g.10gb": 1.5}}), r"mig-devices.1g.10gb: it is not a whole"),
        (entry(**{"mig-devices": {"10gb": 1}}), "mig-devices: '10gb' is not a profile"),
        (entry(**{"device-filter": "H100"}), "device-filter: 'H100' is not like 0x233010DE"),
        (entry(**{"device-filter": "0x1:0x2:0x3"}), "device-filter: '0x1:0x2:0x3' is not"),
        (entry(**{"device-filter": ["0x1FFFFFFFF"]}), "device-filter: '0x1FFFFFFFF' is not"),
        (entry(**{"device-filter": [{}]}), "device-filter: {} is not"),
    ],
)
def test_each_broken_rule_is_one_line_with_its_place(tmp_path: Path, text: str, where: str) -> None:
    with raises(MigConfigInvalid, match=where) as caught:
        read(tmp_path, text)
    assert f"{tmp_path}/layouts.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with raises(MigConfigInvalid, match="it does not exist"):
        read_layouts(str(tmp_path / "missing"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("binary", "."):
        with raises(MigConfigInvalid):
            read_layouts(str(tmp_path / name))


def test_one_layout_needs_no_name(tmp_path: Path) -> None:
    layouts = read(tmp_path, entry())
    assert choose(layouts, None, "x").name == choose(layouts, "one", "x").name == "one"
    with raises(LayoutUnknown, match="the layout two of x does not exist. Name one of one"):
        choose(layouts, "two", "x")
    with raises(LayoutUnknown, match="is one of 2, and none was named"):
        choose(read(tmp_path, GOOD.replace("0x2]", "2]")), None, "x")


NAMES: Final = {
    "1g.10gb": ProfileName(1, 1, 10),
    "1c.3g.40gb": ProfileName(3, 1, 40),
    "1g.10gb+me": ProfileName(1, 1, 10, ("+me",)),
    "1g.24gb+me.all": ProfileName(1, 1, 24, ("+me.all",)),
    "1g.24gb-me": ProfileName(1, 1, 24, ("-me",)),
    "1g.24gb+gfx,me": ProfileName(1, 1, 24, ("+gfx", "+me")),
}


@pytest.mark.parametrize("text", NAMES)
def test_names_are_read_and_written(text: str) -> None:
    assert ProfileName.parse(text) == NAMES[text]
    assert str(NAMES[text]) == text


def test_other_spellings_are_the_same_profile() -> None:
    assert ProfileName.parse("3c.3g.40gb") == ProfileName.parse("3g.40gb")
    assert ProfileName.parse("1g.24gb+me,gfx") == ProfileName.parse("1g.24gb+gfx,me")


@pytest.mark.parametrize(
    "text",
    [
        "", "1g", "10gb", "1g.10", "0g.10gb", "1G.10gb", " 1g.10gb", "1g.10gb ", "1g.10gb+",
        "1g.10gb+me,me", "1g.10gb+me-gfx", "1g.10gb+1me", "1g.10gb+me.", "1g.10gb+.me", "01g.10gb",
        "2c.1g.10gb", "1g.10gb+me,", "1g.10gb\n", "1g.1\u0660gb",
    ],
)  # fmt: skip
def test_these_are_no_profiles(text: str) -> None:
    assert ProfileName.parse(text) is None
