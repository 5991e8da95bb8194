"""Files with numbers, and with invalid content."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shim.cgroup import stats

MOST = 2**64 - 1


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0\n", 0),
        ("18446744073709551615", MOST),
        ("18446744073709551616", MOST),
        ("9" * 5000, MOST),
        (" 12 \n", 12),
        ("max\n", MOST),
        ("-1\n", 0),
        ("", None),
        ("\n", None),
        ("1 2", None),
        ("1_000", None),
        ("0x10", None),
        ("٣", None),
        ("1.5", None),
        ("-", None),
        ("--1", None),
    ],
)
def test_a_number_is_read_or_nothing(text: str, number: int | None) -> None:
    assert stats.number(text) == number


def test_no_limit_is_what_the_version_says_that_it_is() -> None:
    assert stats.number("max", unlimited=0) == 0


@given(st.text())
def test_whatever_a_text_is_it_is_no_error(text: str) -> None:
    number = stats.number(text)
    assert number is None or 0 <= number <= MOST
    assert all(0 <= value <= MOST for value in stats.table(text).values())
    for _, pairs in stats.nested(text):
        assert pairs


def test_lines_that_are_no_pair_are_skipped() -> None:
    text = "anon 1\nfile\nshmem 2 3\nslab x\n\nsock 4\n"
    assert stats.table(text) == {"anon": 1, "sock": 4}


def test_nested_entries_keep_their_order() -> None:
    text = "8:0 rbytes=1 wbytes=2\n8:16 junk rios=3\n253:0\n"
    assert stats.nested(text) == [
        ("8:0", {"rbytes": "1", "wbytes": "2"}),
        ("8:16", {"rios": "3"}),
    ]


def test_what_is_missing_is_nothing(tmp_path: Path) -> None:
    directory = str(tmp_path / "gone")
    text = stats.text_of(directory, "x")
    assert text == ""
    assert stats.table(text) == {}
    assert stats.nested(text) == []
    assert stats.rdma(text) == []
    assert stats.page_sizes(directory, ".current") == []


def test_a_directory_or_bytes_in_place_of_a_file_are_no_error(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00 1\nanon 2\n")
    assert stats.text_of(str(tmp_path), "directory") == ""
    assert stats.table(stats.text_of(str(tmp_path), "bytes"))["anon"] == 2


def test_sizes_of_huge_pages_are_found_by_their_files(tmp_path: Path) -> None:
    for name in (
        "hugetlb.64KB.current", "hugetlb.2MB.current", "hugetlb.1GB.current",
        "hugetlb.32MB.current", "hugetlb.2MB.rsvd.current", "hugetlb.2MB.max", "memory.current",
    ):  # fmt: skip
        (tmp_path / name).touch()
    assert stats.page_sizes(str(tmp_path), ".current") == ["1GB", "32MB", "2MB", "64KB"]


def test_limits_of_rdma_fit_their_field() -> None:
    text = (
        "mlx4_0 hca_handle=2 hca_object=2000\nocrdma1 hca_handle=3 hca_object=max\n"
        "x hca_handle=99999999999\n"
    )
    assert stats.rdma(text) == [
        ("mlx4_0", 2, 2000),
        ("ocrdma1", 3, 2**32 - 1),
        ("x", 2**32 - 1, 0),
    ]
