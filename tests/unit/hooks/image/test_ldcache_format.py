"""The format of ld.so.cache: reading, writing and refusing."""

from __future__ import annotations

import struct
import time
from functools import cmp_to_key

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hooks.image.ldcache import FLAGS, Cache, Entry, parse, serialise
from hooks.image.rootfs_errors import MalformedCache
from hooks.plan import CachedLibrary
from hooks.words import Arch

HWCAP = 1 << 62
X86 = FLAGS[Arch.X86_64]


def names(cache: Cache) -> list[str]:
    return [entry.soname.decode() for entry in cache.entries]


def paths(cache: Cache) -> list[str]:
    return [entry.path.decode() for entry in cache.entries]


def library(soname: str, path: str = "", arch: Arch = Arch.X86_64) -> CachedLibrary:
    return CachedLibrary(soname, path or f"/usr/lib64/{soname}", arch)


def entry(soname: str, path: str = "", flags: int = X86, hwcap: int = 0) -> Entry:
    return Entry(soname.encode(), (path or f"/lib/{soname}").encode(), flags, 0, hwcap)


def number_at(text: list[int], start: int) -> tuple[int, int]:
    """Return the number that starts at ``start``, and the index of its end."""
    end = start
    while 48 <= text[end] <= 57:
        end += 1
    return int(bytes(text[start:end])), end


def libcmp(first: bytes, second: bytes) -> int:
    """Compare names as the loader does, from glibc's description: character by character."""
    a: list[int] = [*first, 0]
    b: list[int] = [*second, 0]
    i = j = 0
    digits = range(48, 58)
    while a[i]:
        if a[i] in digits and b[j] in digits:
            (left, i), (right, j) = number_at(a, i), number_at(b, j)
            if left != right:
                return -1 if left < right else 1
        elif a[i] in digits:
            return 1
        elif b[j] in digits:
            return -1
        elif a[i] != b[j]:
            return a[i] - b[j]
        else:
            i, j = i + 1, j + 1
    return a[i] - b[j]


@pytest.mark.parametrize(
    ("smaller", "greater"),
    [
        ("libz.so.9", "libz.so.10"),  # numbers by value
        ("libz.so", "libz.so.1"),  # a prefix before the longer name
        ("libza", "libz1"),  # a digit after any letter
        ("lib.so.1", "lib.so.1a"),
        ("liba.so", "libb.so"),
        ("lib2a", "lib10"),
    ],
)
def test_names_descend_in_the_loader_s_order(smaller: str, greater: str) -> None:
    for given_in in ([smaller, greater], [greater, smaller]):
        cache = Cache().merge([library(name) for name in given_in])
        assert names(cache) == [greater, smaller]


soname = st.text("ab.-019", min_size=1, max_size=10)


@given(st.lists(soname, unique=True, max_size=12))
def test_the_order_is_that_of_the_loader_s_comparison(sonames: list[str]) -> None:
    merged = Cache().merge([library(name) for name in sonames])
    expected = sorted((name.encode() for name in sonames), key=cmp_to_key(libcmp), reverse=True)
    found = [entry.soname for entry in merged.entries]
    # The loader treats names like "lib01" and "lib1" as equal, in any order.
    assert [libcmp(a, b) for a, b in zip(found, expected, strict=True)] == [0] * len(found)


def test_a_number_too_long_for_an_int_does_not_hurt() -> None:
    cache = Cache().merge([library("lib" + "9" * 5000), library("lib1")])
    assert len(cache.entries) == 2


def test_our_library_takes_the_place_of_the_image_s() -> None:
    before = Cache((entry("libcuda.so.1", "/usr/local/cuda/compat/libcuda.so.1"),))
    after = before.merge([library("libcuda.so.1", "/usr/lib64/libcuda.so.1")])
    assert paths(after) == ["/usr/lib64/libcuda.so.1"]


def test_our_library_wins_over_one_in_a_hwcaps_directory() -> None:
    before = Cache((entry("libcuda.so.1", "/v3/libcuda.so.1", hwcap=HWCAP),), (b"x86-64-v3",))
    assert paths(before.merge([library("libcuda.so.1")])) == ["/usr/lib64/libcuda.so.1"]


def test_the_same_soname_of_another_architecture_stays() -> None:
    before = Cache((entry("libcuda.so.1", "/32/libcuda.so.1", flags=FLAGS[Arch.I386]),))
    after = before.merge([library("libcuda.so.1", "/64/libcuda.so.1")])
    assert paths(after) == ["/64/libcuda.so.1", "/32/libcuda.so.1"]


def test_the_first_of_two_libraries_for_one_soname_wins() -> None:
    assert paths(Cache().merge([library("a", "/1/a"), library("a", "/2/a")])) == ["/1/a"]


def test_merging_twice_changes_nothing() -> None:
    ours = [library("libcuda.so.1"), library("libcuda.so")]
    once = Cache((entry("libc.so.6"), entry("libz.so.1"))).merge(ours)
    assert once.merge(ours) == once


def test_entries_of_one_soname_are_in_the_loader_s_order() -> None:
    other = FLAGS[Arch.I386]
    wanted = (
        entry("a", "/v2", hwcap=HWCAP | 1),
        entry("a", "/v3", hwcap=HWCAP),
        entry("a", "/three-bits", hwcap=0b111),
        entry("a", "/high-bit", hwcap=0b1000),
        entry("a", "/low-bit", hwcap=0b1),
        entry("a", "/plain"),
        entry("a", "/32", flags=other),
    )
    cache = Cache(tuple(reversed(wanted)), (b"x86-64-v3", b"x86-64-v2"))
    assert cache.merge([]).entries == wanted


@pytest.mark.parametrize(
    ("arch", "flags"),
    [
        (Arch.X86_64, 0x0303),
        (Arch.I386, 0x0003),
        (Arch.AARCH64, 0x0A03),
        (Arch.ARM, 0x0903),
    ],
)
def test_flags_of_each_architecture(arch: Arch, flags: int) -> None:
    assert Cache().merge([library("a", arch=arch)]).entries[0].flags == flags


# Strings in a cache end at the first NUL.
text = st.binary(max_size=20).map(lambda b: b.replace(b"\0", b""))
entries = st.builds(
    Entry,
    soname=text,
    path=text,
    flags=st.integers(0, 0x0FFF),
    osversion=st.integers(0, 2**32 - 1),
    hwcap=st.integers(0, 2**64 - 1),
)
caches = st.builds(
    Cache,
    st.lists(entries, max_size=8).map(tuple),
    st.lists(text, max_size=3).map(tuple),
    st.binary(max_size=30),
)


@given(caches)
def test_what_is_written_is_read_again(cache: Cache) -> None:
    assert parse(serialise(cache)) == cache


@given(caches, caches)
def test_a_cache_behind_one_of_the_older_format_is_found(cache: Cache, other: Cache) -> None:
    """It follows n entries of 12 bytes, aligned to 8; string offsets are relative to it."""
    count = len(other.entries)
    old = b"ld.so-1.7.0\0" + struct.pack("<I", count) + bytes(12 * count)
    old += bytes(-len(old) % 8)
    data = bytearray(old + serialise(cache))
    (extensions,) = struct.unpack_from("<I", data, len(old) + 32)
    struct.pack_into("<I", data, len(old) + 32, extensions + len(old))
    at = len(old) + extensions
    (sections,) = struct.unpack_from("<I", data, at + 4)
    for number in range(sections):
        field = at + 8 + 16 * number + 8
        (where,) = struct.unpack_from("<I", data, field)
        struct.pack_into("<I", data, field, where + len(old))
    assert parse(bytes(data)) == cache


def read_or_refused(data: bytes) -> None:
    """Any bytes are a cache or raise one typed error; a cache can be merged and written."""
    try:
        cache = parse(data)
    except MalformedCache:
        return
    assert parse(serialise(cache.merge([library("libcuda.so.1")])))


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    read_or_refused(data)
    read_or_refused(b"glibc-ld.so.cache1.1" + data)
    read_or_refused(b"ld.so-1.7.0\0" + data)


@given(caches, st.data())
def test_a_cache_with_some_bytes_changed_is_read_or_refused(
    cache: Cache, data: st.DataObject
) -> None:
    content = bytearray(serialise(cache))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    read_or_refused(bytes(content[: data.draw(st.integers(0, len(content)))]))


def header(count: int, extensions: int = 0, flags: int = 2) -> bytes:
    return struct.pack("<20sIIB3xI12x", b"glibc-ld.so.cache1.1", count, 0, flags, extensions)


def extension(count: int, *sections: tuple[int, int, int]) -> bytes:
    rows = b"".join(struct.pack("<IIII", tag, 0, where, size) for tag, where, size in sections)
    return struct.pack("<II", 0xEAA42174, count) + rows


@pytest.mark.parametrize(
    ("what", "data"),
    [
        ("nothing", b""),
        ("half a header", header(0)[:47]),
        ("another version", header(0).replace(b"1.1", b"1.2")),
        ("the other byte order", header(0, flags=3)),
        ("a byte order that is marked invalid", header(0, flags=1)),
        ("more entries than bytes", header(2**32 - 1) + bytes(100)),
        ("a string beyond the end", header(1) + struct.pack("<iIIIQ", 3, 4096, 4096, 0, 0)),
        ("a string without an end", header(1) + struct.pack("<iIIIQ", 3, 72, 72, 0, 0) + b"x"),
        ("extensions beyond the end", header(0, 4096)),
        ("extensions off their alignment", header(0, 49) + bytes(64)),
        ("extensions without their mark", header(0, 48) + bytes(64)),
        ("more sections than bytes", header(0, 48) + extension(60)),
        ("more sections than there can be", header(0, 48) + extension(2**32 - 1)),
        ("a section beyond the end", header(0, 48) + extension(1, (0, 4096, 1))),
        ("half a number of a hwcap", header(0, 48) + extension(1, (1, 48, 3))),
        ("only the older format", b"ld.so-1.7.0\0" + struct.pack("<I", 0)),
        ("half of the older header", b"ld.so-1.7.0"),
    ],
)
def test_is_refused(what: str, data: bytes) -> None:
    with pytest.raises(MalformedCache):
        parse(data)


def test_strings_that_overlap_do_not_multiply_into_memory() -> None:
    count = 2000
    start = 48 + 24 * count
    rows = b"".join(
        struct.pack("<iIIIQ", 3, start + n, start + n + 1, 0, 0) for n in range(0, 2 * count, 2)
    )
    with pytest.raises(MalformedCache):
        parse(header(count) + rows + b"x" * (2 * count) + bytes(2) + b"")


def test_a_soname_that_no_file_could_have_is_refused() -> None:
    """Sorting thousands of names with thousands of numbers would block a whole pod."""
    parse(serialise(Cache((entry("a" * 255, "/lib/a"),))))
    with pytest.raises(MalformedCache, match="no file"):
        parse(serialise(Cache((entry("9a" * 128, "/lib/a"),))))


def test_many_entries_of_one_name_take_no_longer_than_their_file() -> None:
    same = entry("9a" * 127, "/lib/a")
    cache = Cache(tuple(same._replace(hwcap=number) for number in range(20_000)))
    began = time.process_time()
    parse(serialise(cache)).merge([library("libcuda.so.1")])
    assert time.process_time() - began < 2


def test_an_unset_byte_order_is_taken_for_ours() -> None:
    assert parse(header(0, flags=0)).entries == ()


def test_an_unknown_section_is_left_out() -> None:
    data = header(0, 48) + extension(2, (7, 0, 20), (0, 88, 4)) + b"made"
    assert parse(data).generator == b"made"
    assert len(serialise(parse(data))) < len(data)


def test_sonames_share_the_end_of_their_paths() -> None:
    cache = Cache().merge([library("libcuda.so.1", "/usr/lib64/libcuda.so.1")])
    assert serialise(cache).count(b"libcuda.so.1\0") == 1
