"""Reading ELF files: real, broken and artificial ones."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hooks.image.elf import Elf, elf_of_bytes, elf_of_fd
from hooks.image.rootfs_errors import MalformedElf
from hooks.words import Arch
from tests.unit.hooks.image.images import elf_header

needs_gcc = pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")


def elf_at(path: str) -> Elf:
    fd = os.open(path, os.O_RDONLY)
    try:
        return elf_of_fd(fd)
    finally:
        os.close(fd)


def compiled(path: Path, *options: str) -> str:
    out = str(path / "out")
    argv = ["gcc", "-nostdlib", "-x", "c", "-", "-o", out, *options]
    subprocess.run(argv, input="int f(void) { return 1; }", text=True, check=True)
    return out


@needs_gcc
def test_a_library_says_its_name_and_machine(tmp_path: Path) -> None:
    path = compiled(tmp_path, "-shared", "-Wl,-soname,libcuda.so.1")
    assert elf_at(path) == Elf(Arch(os.uname().machine), "libcuda.so.1")


@needs_gcc
def test_a_library_without_a_soname_has_none(tmp_path: Path) -> None:
    assert elf_at(compiled(tmp_path, "-shared")).soname is None


@needs_gcc
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="gcc makes i386 code on x86-64 only")
def test_a_32_bit_library_is_read(tmp_path: Path) -> None:
    path = compiled(tmp_path, "-m32", "-shared", "-Wl,-soname,libcuda.so.1")
    assert elf_at(path) == Elf(Arch.I386, "libcuda.so.1")


def test_a_program_says_its_loader_and_kernel() -> None:
    elf = elf_at("/bin/sh")
    assert elf.arch is Arch(os.uname().machine)
    assert elf.interpreter is not None
    assert "/ld-linux" in elf.interpreter
    assert elf.kernel is not None
    assert elf.kernel >= (2, 6, 0)


def test_the_offset_of_the_descriptor_is_not_moved() -> None:
    with open("/bin/sh", "rb") as file:
        elf_of_fd(file.fileno())
        assert file.tell() == 0


@pytest.mark.parametrize("arch", list(Arch))
def test_every_architecture_is_told_by_its_header(arch: Arch) -> None:
    assert elf_of_bytes(elf_header(arch)).arch is arch


def test_an_unknown_machine_is_no_architecture() -> None:
    data = bytearray(elf_header(Arch.X86_64))
    data[18] = 243  # RISC-V
    assert elf_of_bytes(bytes(data)).arch is None
    data[18], data[4] = 62, 1  # x32: the machine of x86-64 in 32-bit class
    assert elf_of_bytes(bytes(data)).arch is None


def library(soname: bytes, *, where: int = 1, size: int | None = None, address: int = 0) -> bytes:
    """Build a 64-bit library: header, two segments, a dynamic section, strings."""
    strings = b"\0" + soname + b"\0"
    at = 64 + 2 * 56
    dynamic = struct.pack(
        "<QQQQQQQQ",
        *(5, (address or at + 64)),
        *(10, len(strings) if size is None else size),
        *(14, where),
        *(0, 0),
    )
    total = at + len(dynamic) + len(strings)
    load = struct.pack("<IIQQQQQQ", 1, 4, 0, 0, 0, total, total, 4096)
    section = struct.pack("<IIQQQQQQ", 2, 4, at, at, at, len(dynamic), len(dynamic), 8)
    header = bytearray(elf_header(Arch.X86_64))
    struct.pack_into("<Q", header, 32, 64)
    struct.pack_into("<HH", header, 54, 56, 2)
    return bytes(header) + load + section + dynamic + strings


def test_a_made_up_library_is_read() -> None:
    assert elf_of_bytes(library(b"libcuda.so.1")).soname == "libcuda.so.1"


@pytest.mark.parametrize(
    ("what", "data"),
    [
        ("nothing", b""),
        ("a script", b"#!/bin/sh\n" + bytes(100)),
        ("half a header", elf_header(Arch.X86_64)[:40]),
        ("a class that is none", elf_header(Arch.X86_64).replace(b"ELF\2", b"ELF\3")),
        ("the other byte order", elf_header(Arch.X86_64).replace(b"ELF\2\1", b"ELF\2\2")),
        ("a soname beyond its table", library(b"x", where=4096)),
        ("a soname without an end", library(b"x" * 300)),
        ("a soname with a slash", library(b"../../etc/passwd")),
        ("an empty soname", library(b"")),
        ("a table outside of its segments", library(b"x", address=1 << 40)),
        ("a file that ends too early", library(b"libcuda.so.1")[:-5]),
        ("a file without its program headers", library(b"libcuda.so.1")[:100]),
    ],
)
def test_is_refused(what: str, data: bytes, tmp_path: Path) -> None:
    with pytest.raises(MalformedElf):
        elf_of_bytes(data)
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(MalformedElf):
        elf_at(str(tmp_path / "file"))


def test_a_second_dynamic_section_is_not_looked_at() -> None:
    """A file has one; two hundred of 64 KiB in every file of an image would take long."""
    segment = struct.pack("<IIQQQQQQ", 2, 4, 64 + 256 * 56, 0, 0, 1 << 16, 1 << 16, 8)
    header = bytearray(elf_header(Arch.X86_64))
    struct.pack_into("<Q", header, 32, 64)
    struct.pack_into("<HH", header, 54, 56, 256)
    data = bytes(header) + segment * 256 + struct.pack("<QQ", 1, 1) * 4096
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        assert elf_of_bytes(data).soname is None
    finally:
        sys.setprofile(None)
    assert calls < 20_000  # one section takes 9,000


def test_too_many_program_headers_are_refused() -> None:
    data = bytearray(library(b"x"))
    struct.pack_into("<H", data, 56, 65535)
    with pytest.raises(MalformedElf, match="65535 program headers"):
        elf_of_bytes(bytes(data))


def read_or_refused(data: bytes) -> None:
    try:
        elf = elf_of_bytes(data)
    except MalformedElf:
        return
    assert elf.soname is None or ("/" not in elf.soname and len(elf.soname) <= 255)


@given(st.binary(max_size=200), st.sampled_from([b"\x7fELF\1\1", b"\x7fELF\2\1", b""]))
def test_any_bytes_are_read_or_refused(data: bytes, magic: bytes) -> None:
    read_or_refused(magic + data)


@given(st.data())
def test_a_library_with_some_bytes_changed_is_read_or_refused(data: st.DataObject) -> None:
    content = bytearray(library(b"libcuda.so.1"))
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    read_or_refused(bytes(content))
    fd = os.memfd_create("elf")
    try:
        os.write(fd, content)
        try:
            elf_of_fd(fd)
        except MalformedElf:
            pass
    finally:
        os.close(fd)


@given(st.binary(max_size=120))
def test_any_notes_are_read_or_passed_over(notes: bytes) -> None:
    """The sizes in a note segment may be arbitrary."""
    header = bytearray(elf_header(Arch.X86_64))
    struct.pack_into("<Q", header, 32, 64)
    struct.pack_into("<HH", header, 54, 56, 1)
    note = struct.pack("<IIQQQQQQ", 4, 4, 120, 0, 0, len(notes), len(notes), 4)
    elf = elf_of_bytes(bytes(header) + note + notes)
    assert elf.arch is Arch.X86_64
