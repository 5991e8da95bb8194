"""Read facts from an ELF file: machine, soname, interpreter, kernel ABI.

They show which loader a file is for, and under which name programs request it, without running
anything, even ldconfig. The files may be an image's, so every offset and every count is bounded
before use:

- at most 256 program headers and as many sections, 64 KiB of dynamic section, 4 KiB of one
  segment or section of notes;
- names of at most 255 bytes (a soname) and 4095 (an interpreter), without a slash in a soname.

A file that is not an ELF file, or is inconsistent in the parts read here, raises
:class:`MalformedElf`; no content raises anything else. An unknown machine is not an error: ``arch``
is None. Parts that are not needed are not checked.

Source: System V gABI chapters 4 and 5; LSB "NT_GNU_ABI_TAG"; <elf.h>.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from struct import Struct
from typing import Final, TypeAlias

from api.values import dataclass
from hooks.image.rootfs_errors import MalformedElf
from hooks.words import Arch

_Reader: TypeAlias = Callable[[int, int], bytes]
_Segments: TypeAlias = list[tuple[int, int, int, int]]


_ARCHES: Final = {
    (2, 62): Arch.X86_64,  # class 32 with this machine is x32, for which there is no driver
    (1, 3): Arch.I386,
    (2, 183): Arch.AARCH64,
    (1, 40): Arch.ARM,
}
"""(EI_CLASS, e_machine) → architecture."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """The field positions in one of the two classes.

    ``header`` reads (e_machine, e_phoff, e_phentsize, e_phnum), ``segment`` (p_type, p_offset,
    p_vaddr, p_filesz), ``dynamic`` (d_tag, d_val), ``sections`` (e_shoff, e_shentsize, e_shnum),
    ``section`` (sh_type, sh_offset, sh_size).
    """

    header: Struct
    segment: Struct
    dynamic: Struct
    sections: Struct
    section: Struct


# e_ident is 16 bytes; then type, machine, version, entry, phoff, shoff, flags, ehsize,
# phentsize, phnum. Program headers differ in more than width: p_flags moved.
_SHAPES: Final = {
    1: _Shape(
        Struct("<16x2xH4x4xI4x4x2xHH"),
        Struct("<III4xI"),
        Struct("<II"),
        Struct("<32xI10xHH"),
        Struct("<4xI8xII"),
    ),
    2: _Shape(
        Struct("<16x2xH4x8xQ8x4x2xHH"),
        Struct("<I4xQQ8xQ"),
        Struct("<QQ"),
        Struct("<40xQ10xHH"),
        Struct("<4xI16xQQ"),
    ),
}

_PT_LOAD: Final = 1
_PT_DYNAMIC: Final = 2
_PT_INTERP: Final = 3
_PT_NOTE: Final = 4
_SHT_NOTE: Final = 7
_DT_NULL: Final = 0
_DT_STRTAB: Final = 5
_DT_STRSZ: Final = 10
_DT_SONAME: Final = 14
_NT_GNU_ABI_TAG: Final = 1
_OS_LINUX: Final = 0

_MOST_SEGMENTS: Final = 256
_LONGEST_SEGMENT: Final = 256
_LONGEST_DYNAMIC: Final = 1 << 16
_LONGEST_NOTE: Final = 1 << 12
_LONGEST_NAME: Final = 255
_LONGEST_PATH: Final = 4095

_NOTE: Final = Struct("<III")
# e_shentsize, e_shnum and e_shstrndx, after the fields read from every file.
_SECTION_FIELDS: Final = 6
_ABI: Final = Struct("<IIII")


@dataclass(frozen=True, slots=True)
class Elf:
    """The facts of one file."""

    arch: Arch | None  # the architecture; None if unknown
    soname: str | None = None  # the name that programs request (DT_SONAME), if any
    # the dynamic loader that starts it; None for libraries
    interpreter: str | None = None
    # the oldest Linux that it supports, by its ABI tag; None without one
    kernel: tuple[int, int, int] | None = None


def elf_of_fd(fd: int) -> Elf:
    """Read an open ELF file, without moving its offset.

    Raises:
        MalformedElf: it is not an ELF file, is inconsistent, or cannot be read.
    """
    return _elf(_reader(fd))


def _reader(fd: int) -> _Reader:
    def read(offset: int, size: int) -> bytes:
        try:
            return os.pread(fd, size, offset)
        except (OSError, OverflowError) as error:
            raise _malformed("a place in it cannot be read") from error

    return read


def text_notes_of_fd(fd: int, owner: bytes) -> Iterator[bytes]:
    """Yield the text of one owner's notes in an open file.

    Notes outside of all segments are found by their sections. Linkers pad a name differently (to
    four bytes, to the section's alignment, from its own start or the note's), so all NULs after it
    are skipped.

    Args:
        fd: a regular file, open for reading; its offset is not moved.

    Yields:
        The text of each note, or the part that is in the file.

    Raises:
        MalformedElf: it is not an ELF file, is inconsistent, or cannot be read.
    """
    read = _reader(fd)
    shape, ident = _header(read)
    _, table, entry, count = shape.header.unpack_from(ident)
    segments = _segments(read, shape, table, entry, count)
    places = [(offset, size) for what, offset, _, size in segments if what == _PT_NOTE]
    if len(ident) >= shape.sections.size:
        sections = _sections(read, shape, ident)
        places += [(offset, size) for what, offset, size in sections if what == _SHT_NOTE]
    for offset, room in dict.fromkeys(places):
        data = read(offset, min(room, _LONGEST_NOTE))
        for name, _, end, size in _notes(data):
            if name.rstrip(b"\0") == owner:
                yield data[end:].lstrip(b"\0")[:size].rstrip(b"\0")


def elf_of_bytes(data: bytes) -> Elf:
    """Read an ELF file, or the start of one, in memory.

    Raises:
        MalformedElf: it is not an ELF file, or is inconsistent.
    """
    return _elf(lambda offset, size: data[offset : offset + size])


def _malformed(found: str) -> MalformedElf:
    return MalformedElf("what an ELF file says about itself", found=found)


def _header(read: _Reader) -> tuple[_Shape, bytes]:
    """Return the file's class and its first bytes, with a complete header."""
    ident = read(0, _SHAPES[2].header.size + _SECTION_FIELDS)
    if ident[:4] != b"\x7fELF" or len(ident) < _SHAPES[1].header.size:
        raise _malformed("no ELF header")
    kind, order = ident[4], ident[5]
    shape = _SHAPES.get(kind)
    if shape is None or order != 1:
        raise _malformed(f"ELF of class {kind} in byte order {order}")
    if len(ident) < shape.header.size:
        raise _malformed("half an ELF header")
    return shape, ident


def _elf(read: _Reader) -> Elf:
    """Read with ``read(offset, size)``, which may return fewer bytes."""
    shape, ident = _header(read)
    machine, table, entry, count = shape.header.unpack_from(ident)
    arch = _ARCHES.get((ident[4], machine))
    segments = _segments(read, shape, table, entry, count)
    interpreter = None
    kernel = None
    soname = None
    is_dynamic = False
    for what, offset, _, size in segments:
        if what == _PT_INTERP and interpreter is None:
            interpreter = _text(read, offset, min(size, _LONGEST_PATH + 1), "interpreter")
        elif what == _PT_NOTE and kernel is None:
            kernel = _abi_tag(read(offset, min(size, _LONGEST_NOTE)))
        elif what == _PT_DYNAMIC and not is_dynamic:  # there is one; hundreds would take long
            is_dynamic = True
            soname = _soname(read, shape, segments, offset, size)
    return Elf(arch, soname, interpreter, kernel)


def _segments(read: _Reader, shape: _Shape, table: int, entry: int, count: int) -> _Segments:
    """Return (type, offset in the file, address, size in the file) of every segment."""
    if count == 0:
        return []
    if count > _MOST_SEGMENTS or not shape.segment.size <= entry <= _LONGEST_SEGMENT:
        raise _malformed(f"{count} program headers of {entry} bytes")
    data = read(table, count * entry)
    if len(data) < count * entry:
        raise _malformed("program headers beyond its end")
    rows = (shape.segment.unpack_from(data, n * entry) for n in range(count))
    return [(kind, offset, address, size) for kind, offset, address, size in rows]


def _sections(read: _Reader, shape: _Shape, ident: bytes) -> list[tuple[int, int, int]]:
    """Return (type, offset in the file, size) of every section; none without a table."""
    table, entry, count = shape.sections.unpack_from(ident)
    if count == 0 or table == 0:
        return []
    if count > _MOST_SEGMENTS or not shape.section.size <= entry <= _LONGEST_SEGMENT:
        raise _malformed(f"{count} sections of {entry} bytes")
    data = read(table, count * entry)
    if len(data) < count * entry:
        raise _malformed("sections beyond its end")
    rows = (shape.section.unpack_from(data, n * entry) for n in range(count))
    return [(kind, offset, size) for kind, offset, size in rows]


def _soname(
    read: _Reader, shape: _Shape, segments: _Segments, offset: int, size: int
) -> str | None:
    """Return DT_SONAME from the string table, which is located by its address."""
    data = read(offset, min(size, _LONGEST_DYNAMIC))
    whole = len(data) - len(data) % shape.dynamic.size
    tags: dict[int, int] = {}
    for tag, number in shape.dynamic.iter_unpack(data[:whole]):
        if tag == _DT_NULL:
            break
        tags.setdefault(tag, number)
    if _DT_SONAME not in tags:
        return None
    where = tags[_DT_SONAME]
    if _DT_STRTAB not in tags or where >= tags.get(_DT_STRSZ, 0):
        raise _malformed("a soname outside of its string table")
    address = tags[_DT_STRTAB]
    for what, start, lowest, length in segments:
        if what == _PT_LOAD and lowest <= address < lowest + length:
            room = tags[_DT_STRSZ] - where
            offset = start + (address - lowest) + where
            name = _text(read, offset, min(room, _LONGEST_NAME + 1), "soname")
            if not name or "/" in name:
                raise _malformed("a soname that is not a file name")
            return name
    raise _malformed("a string table outside of its segments")


def _text(read: _Reader, offset: int, size: int, what: str) -> str:
    """Return the string at ``offset``, which ends with a NUL within ``size`` bytes."""
    data = read(offset, size)
    end = data.find(b"\0")
    if end < 0:
        raise _malformed(f"a {what} without an end")
    return os.fsdecode(data[:end])


def _abi_tag(data: bytes) -> tuple[int, int, int] | None:
    """Return the kernel version of the GNU ABI tag, if it is among these notes."""
    for name, kind, end, size in _notes(data):
        body = _padded(end)
        if (
            kind == _NT_GNU_ABI_TAG
            and name == b"GNU\0"
            and size >= _ABI.size
            and body + _ABI.size <= len(data)
        ):
            system, major, minor, patch = _ABI.unpack_from(data, body)
            return (major, minor, patch) if system == _OS_LINUX else None
    return None


def _notes(data: bytes) -> Iterator[tuple[bytes, int, int, int]]:
    """Yield owner, type, end of the owner's name, and descriptor size of each note.

    A note consists of name size, descriptor size, type, name, descriptor; the last two are padded
    to four bytes.
    """
    at = 0
    while at + _NOTE.size <= len(data):
        name_size, size, kind = _NOTE.unpack_from(data, at)
        end = at + _NOTE.size + name_size
        yield data[at + _NOTE.size : end], kind, end, size
        at = _padded(_padded(end) + size)


def _padded(offset: int) -> int:
    return (offset + 3) // 4 * 4
