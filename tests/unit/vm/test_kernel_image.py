"""The kernel in a bzImage, and what is none."""

from __future__ import annotations

import lzma
import struct
import subprocess

import pytest

from tests.tools.errors import KernelUnusable
from tests.tools.vm.kernel import decompress_image

KERNEL = b"\x7fELF" + bytes(range(256)) * 40
SETUP_SECTORS = 3


def bzimage(payload: bytes, *, magic: bytes = b"HdrS") -> bytes:
    setup = bytearray((SETUP_SECTORS + 1) * 512)
    setup[0x1F1] = SETUP_SECTORS
    setup[0x202 : 0x202 + len(magic)] = magic
    before = b"the decompressor"
    struct.pack_into("<II", setup, 0x248, len(before), len(payload))
    return bytes(setup) + before + payload + b"what comes after"


def sized(payload: bytes) -> bytes:
    """A payload as the kernel's build makes it: followed by the size of what is in it."""
    return payload + struct.pack("<I", len(KERNEL))


def test_kernel_comes_out_of_either_compression() -> None:
    zstd = subprocess.run(["zstd", "-cq"], input=KERNEL, capture_output=True, check=True).stdout
    for payload in (lzma.compress(KERNEL, check=lzma.CHECK_CRC32), zstd):
        assert decompress_image(bzimage(sized(payload)), "vmlinuz") == KERNEL


@pytest.mark.parametrize(
    ("image", "found"),
    [
        (b"", "no boot header"),
        (bzimage(b"", magic=b"nope"), "no boot header"),
        (bzimage(b"\x1f\x8b\x08\x00"), "1f8b0800"),
        (bzimage(sized(b"\x28\xb5\x2f\xfd garbage")), "zstd ended with 1"),
        (bzimage(sized(b"\xfd7zXZ\0 garbage")), "xz"),
    ],
)
def test_what_is_no_kernel_is_a_typed_error(image: bytes, found: str) -> None:
    with pytest.raises(KernelUnusable, match=found):
        decompress_image(image, "vmlinuz")
