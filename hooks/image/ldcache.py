"""Read and write glibc's ld.so.cache, without ldconfig and without a file.

With the cache, a loader finds libraries in any directory: it looks a soname up by binary search,
and takes the first entry that fits. :func:`parse` turns a cache's bytes into a :class:`Cache`,
:meth:`Cache.merge` puts our libraries first, and :func:`serialise` returns bytes again.

The format, glibc-ld.so.cache1.1 (numbers are little-endian here, and checked to be)::

    0   "glibc-ld.so.cache" "1.1"                                            20 bytes
    20  number of entries, size of the strings                                u32 u32
    28  flags (its two lowest bits: 0 unset, 2 little-endian, 3 big-endian)  u8, 3 unused
    32  where the extensions start, from the start of the file; or 0         u32, 12 unused
    48  entries: flags i32, soname u32, path u32, osversion u32, hwcap u64
        strings, each with a NUL
        extensions, on a multiple of 4: magic, count, then per section
            tag, flags, where, size                                           u32 each

Rules
- Soname and path are offsets of strings. A file may start with a cache of the older format
  ("ld.so-1.7.0"). Ours then comes after that, on a multiple of 8; the offsets of strings count from
  its start, and those of extensions and sections from the start of the file. (In this case
  ``ldconfig -p`` reads the strings of hwcaps from the start of the file, and prints garbage;
  ldconfig writes them as described here.) We write no older part, because nothing since glibc 2.2
  needs it.
- ``flags`` tells an entry's kind of program; a loader skips entries of other kinds.
- An entry for a glibc-hwcaps directory has bit 62 of ``hwcap`` set and the number of the
  directory's name in its low half; the names are in the extension section with tag 1. Section 0 has
  the line that names the file's generator. Other sections are unknown, and their offsets would be
  wrong in a new file, so they are left out.
- The order is the loader's own, _dl_cache_libcmp, descending: numbers in a name compare as numbers
  ("libz.so.10" before "libz.so.9"), and a digit is greater than any other character. Entries with
  the same soname are sorted by flags, glibc-hwcaps name, number of hwcap bits, hwcap and osversion,
  all descending. In any other order, a search misses entries.
- The file may be an image's, so each offset and each count is bounded before use. So are the total
  size of the strings, and the length of a soname, because sorting names with thousands of numbers
  takes long, and no file name is that long.

Source: glibc, sysdeps/generic/dl-cache.h, elf/cache.c, elf/dl-cache.c.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from struct import Struct
from typing import Final, NamedTuple

from api.values import dataclass
from hooks.image.rootfs_errors import MalformedCache
from hooks.plan import CachedLibrary
from hooks.words import Arch

FLAGS: Final = {
    Arch.X86_64: 0x0303,
    Arch.I386: 0x0003,
    Arch.AARCH64: 0x0A03,
    Arch.ARM: 0x0903,
}
"""The flags of an entry per architecture: 3 is ELF for libc6, the byte above is the ABI
(0x03 x86-64, 0x09 ARM hard float, 0x0a AArch64). Source: glibc, sysdeps/*/ldconfig.h."""

_MAGIC: Final = b"glibc-ld.so.cache1.1"
_OLD_MAGIC: Final = b"ld.so-1.7.0"
_OLD_HEADER: Final = Struct("<12sI")
_OLD_ENTRY: Final = 12
_HEADER: Final = Struct("<20sIIB3xI12x")
_ENTRY: Final = Struct("<iIIIQ")
_EXTENSIONS: Final = Struct("<II")
_SECTION: Final = Struct("<IIII")
_EXTENSION_MAGIC: Final = 0xEAA42174
_TAG_GENERATOR: Final = 0
_TAG_HWCAPS: Final = 1

_ENDIAN_MASK: Final = 3
_ENDIAN_UNSET: Final = 0
_LITTLE_ENDIAN: Final = 2

# Bit 62 alone marks an extension; the ten bits from 32 on are an additional ISA level.
_HWCAP_EXTENSION: Final = 1 << 62
_HWCAP_KIND: Final = 0xFFFF_FC00_0000_0000
_HWCAP_INDEX: Final = 0xFFFF_FFFF

_LONGEST_STRING: Final = 4096
_LONGEST_SONAME: Final = 255
_LONGEST_GENERATOR: Final = 256
_MOST_SECTIONS: Final = 64
_MOST_HWCAPS: Final = 1024

_GENERATOR: Final = b"containerd-shim-nvidia"


class Entry(NamedTuple):
    """One entry: programs whose loader accepts ``flags`` find ``soname`` at ``path``.

    This is a named tuple, unlike other values, because each container's cache has hundreds.
    """

    soname: bytes
    path: bytes
    flags: int
    osversion: int = 0
    hwcap: int = 0

    def is_extension(self) -> bool:
        """Whether it stands for a glibc-hwcaps directory."""
        return self.hwcap & _HWCAP_KIND == _HWCAP_EXTENSION


@dataclass(frozen=True, slots=True)
class Cache:
    """The content of a cache."""

    entries: tuple[Entry, ...] = ()
    # names of the glibc-hwcaps directories, to which entries refer by number
    hwcaps: tuple[bytes, ...] = ()
    generator: bytes = _GENERATOR  # the line that names its generator

    def merge(self, libraries: Iterable[CachedLibrary]) -> Cache:
        """Return this cache with ``libraries``, in the loader's order.

        A library replaces every entry with its soname and architecture, including those in
        glibc-hwcaps directories, which would take precedence. Of two libraries with the same soname
        and architecture, the first wins.

        Returns:
            A new cache; the result is deterministic, and merging twice changes nothing.
        """
        ours: dict[tuple[bytes, int], Entry] = {}
        for library in libraries:
            soname, flags = os.fsencode(library.soname), FLAGS[library.arch]
            ours.setdefault((soname, flags), Entry(soname, os.fsencode(library.path), flags))
        entries = [entry for entry in self.entries if (entry[0], entry[2]) not in ours]
        entries.extend(ours.values())
        entries.sort(key=self._rank)
        # Two stable sorts: names descending, and ranks ascending.
        names = {name: name_rank(name) for name in {entry[0] for entry in entries}}
        entries.sort(key=lambda entry: names[entry[0]], reverse=True)
        return Cache(tuple(entries), self.hwcaps, self.generator)

    def _rank(self, entry: Entry) -> tuple[int, bool, bytes, int, int, int]:
        """Return the sort key of ``entry`` among those of its soname; the smallest comes first."""
        if entry.is_extension():
            index = entry.hwcap & _HWCAP_INDEX
            name = self.hwcaps[index] if index < len(self.hwcaps) else b""
            return (-entry.flags, False, name, 0, -entry.hwcap, -entry.osversion)
        bits = entry.hwcap.bit_count()
        return (-entry.flags, True, b"", -bits, -entry.hwcap, -entry.osversion)


_NUMBER: Final = re.compile("[0-9]+")


def _number_rank(match: re.Match[str]) -> str:
    """Return a number as a string that compares by value, and after any character.

    glibc adds the digits up in an int, so absurdly large numbers wrap around.
    """
    value = (int(match[0][-64:]) + 0x8000_0000) % (1 << 32)
    return f"\u0100{value:010d}"


def name_rank(name: bytes) -> str:
    """Return a key that sorts names as _dl_cache_libcmp does.

    glibc compares ``char``, whose sign depends on the machine; here it is unsigned. Sonames that
    are not ASCII (none are known) might be out of order on x86.
    """
    return _NUMBER.sub(_number_rank, name.decode("latin-1"))


def parse(data: bytes) -> Cache:
    """Return the entries of a cache, in its own order.

    Raises:
        MalformedCache: it has another format or byte order, or an offset leads outside.
    """
    base = _start_of_cache(data)
    if len(data) < base + _HEADER.size or data[base : base + len(_MAGIC)] != _MAGIC:
        raise _malformed("no cache of format 1.1")
    _, count, _, flags, extensions = _HEADER.unpack_from(data, base)
    if flags & _ENDIAN_MASK not in {_ENDIAN_UNSET, _LITTLE_ENDIAN}:
        raise _malformed("a cache of the other byte order")
    first = base + _HEADER.size
    last = first + count * _ENTRY.size
    if last > len(data):
        raise _malformed(f"{count} entries in {len(data)} bytes")
    strings = _Strings(data, budget=4 * len(data))
    at = strings.at
    entries = tuple(
        Entry(at(base + soname), at(base + path), flags, osversion, hwcap)
        for flags, soname, path, osversion, hwcap in _ENTRY.iter_unpack(data[first:last])
    )
    if any(len(name) > _LONGEST_SONAME for name in {entry[0] for entry in entries}):
        raise _malformed("a soname that no file could have")
    generator, hwcaps = _extensions(data, extensions, base, strings)
    return Cache(entries, hwcaps, generator)


def serialise(cache: Cache) -> bytes:
    """Return the content of an ld.so.cache."""
    start = _HEADER.size + len(cache.entries) * _ENTRY.size
    strings = bytearray()
    places: dict[bytes, int] = {}

    def place(text: bytes) -> int:
        found = places.get(text)
        if found is None:
            found = places[text] = start + len(strings)
            strings.extend(text + b"\0")
        return found

    pack = _ENTRY.pack
    entries = bytearray()
    for soname, path, flags, osversion, hwcap in cache.entries:
        where = place(path)
        # Nearly every path ends with its soname, which can share the path's bytes.
        if path.endswith(soname):
            name = places.setdefault(soname, where + len(path) - len(soname))
        else:
            name = place(soname)
        entries += pack(flags, name, where, osversion, hwcap)
    names = [place(name) for name in cache.hwcaps]
    size = len(strings)
    strings.extend(bytes(-(start + size) % 4))
    extensions = start + len(strings)
    header = _HEADER.pack(_MAGIC, len(cache.entries), size, _LITTLE_ENDIAN, extensions)
    return b"".join(
        (header, entries, strings, _packed_extensions(extensions, cache.generator, names))
    )


def _malformed(found: str) -> MalformedCache:
    return MalformedCache("the ld.so.cache of the image", found=found)


def _start_of_cache(data: bytes) -> int:
    """Return the offset of the cache in our format: 0, or after one in the older format."""
    if not data.startswith(_OLD_MAGIC):
        return 0
    if len(data) < _OLD_HEADER.size:
        raise _malformed("half a header of the older format")
    _, count = _OLD_HEADER.unpack_from(data)
    end: int = _OLD_HEADER.size + count * _OLD_ENTRY
    return (end + 7) // 8 * 8


class _Strings:
    """The strings of a file, by offset. They may overlap in any way, so their total is limited."""

    __slots__ = ("_budget", "_data", "_known")

    def __init__(self, data: bytes, budget: int) -> None:
        self._data = data
        self._budget = budget
        self._known: dict[int, bytes] = {}

    def at(self, offset: int) -> bytes:
        text = self._known.get(offset)
        if text is None:
            end = self._data.find(b"\0", offset, offset + _LONGEST_STRING)
            if end < 0:
                raise _malformed(f"a string at {offset} that has no end")
            text = self._known[offset] = self._data[offset:end]
            self._budget -= len(text)
            if self._budget < 0:
                raise _malformed("strings that overlap without need")
        return text


def _extensions(
    data: bytes, offset: int, base: int, strings: _Strings
) -> tuple[bytes, tuple[bytes, ...]]:
    """Return the file's generator, and the names of its glibc-hwcaps directories."""
    generator: bytes = b""
    hwcaps: tuple[bytes, ...] = ()
    if offset == 0:
        return generator, hwcaps
    if offset % 4 or offset + _EXTENSIONS.size > len(data):
        raise _malformed(f"extensions at {offset} of {len(data)} bytes")
    magic, count = _EXTENSIONS.unpack_from(data, offset)
    first = offset + _EXTENSIONS.size
    if magic != _EXTENSION_MAGIC or count > _MOST_SECTIONS:
        raise _malformed("no extensions where they should start")
    if first + count * _SECTION.size > len(data):
        raise _malformed(f"{count} extensions beyond its end")
    for number in range(count):
        tag, _, where, size = _SECTION.unpack_from(data, first + number * _SECTION.size)
        if where + size > len(data):
            raise _malformed("an extension beyond its end")
        if tag == _TAG_GENERATOR:
            generator = data[where : where + min(size, _LONGEST_GENERATOR)]
        elif tag == _TAG_HWCAPS:
            if size % 4 or where % 4 or size // 4 > _MOST_HWCAPS:
                raise _malformed(f"{size} bytes of glibc-hwcaps at {where}")
            offsets = Struct(f"<{size // 4}I").unpack_from(data, where)
            hwcaps = tuple(strings.at(base + place) for place in offsets)
    return generator, hwcaps


def _packed_extensions(start: int, generator: bytes, names: list[int]) -> bytes:
    """Pack the extensions for offset ``start`` of a file: numbers first, which are aligned."""
    # Like ldconfig, write the section of hwcaps only if there are any.
    tags = ([_TAG_HWCAPS] if names else []) + ([_TAG_GENERATOR] if generator else [])
    where = start + _EXTENSIONS.size + len(tags) * _SECTION.size
    parts = [_EXTENSIONS.pack(_EXTENSION_MAGIC, len(tags))]
    bodies = {_TAG_HWCAPS: Struct(f"<{len(names)}I").pack(*names), _TAG_GENERATOR: generator}
    for tag in sorted(tags):
        ahead = len(bodies[_TAG_HWCAPS]) if tag == _TAG_GENERATOR and names else 0
        parts.append(_SECTION.pack(tag, 0, where + ahead, len(bodies[tag])))
    parts.extend(bodies[tag] for tag in tags)
    return b"".join(parts)
