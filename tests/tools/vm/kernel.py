"""The guest's kernel: Debian's package, unpacked and never installed.

The image is decompressed: the emulator boots a plain vmlinux as well (by its PVH entry), and
the guest does not spend seconds on what the host does in one. Modules are decompressed for the
same reason, and because the initial root's insmod can load no others.

Source: Linux Documentation/arch/x86/boot.rst (setup_sects, payload_offset, payload_length);
modprobe(8).
"""

from __future__ import annotations

import glob
import lzma
import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from integration.simulated.packages import unpack
from tests.tools.errors import KernelUnusable
from tests.tools.packages import fetch
from tests.tools.vm import tools
from tests.tools.vm.guests import Guest

_META_PACKAGE: Final = "linux-image-amd64"

# Of the boot header: where it says what it is, and where the compressed kernel is.
_SETUP_SECTORS: Final = 0x1F1
_MAGIC: Final = (0x202, b"HdrS")
_PAYLOAD: Final = 0x248
_SECTOR: Final = 512

_XZ: Final = b"\xfd7zXZ\0"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True, slots=True)
class Kernel:
    """An unpacked kernel."""

    directory: str  # where it is; ``lib/modules/VERSION`` is below it
    version: str  # its version, as ``uname -r`` says it

    @classmethod
    def fetch(cls, guest: Guest, directory: str, *, say: Callable[[str], None]) -> Kernel:
        """Have a guest's kernel.

        Args:
            guest: whose.
            directory: where to; what was there before is replaced.
            say: told what is being downloaded.

        Raises:
            PackagesError: the package cannot be had.
            KernelUnusable: there is no kernel in it.
        """
        [meta] = fetch([_META_PACKAGE], release=guest.release, say=say)
        asked = f"the kernel of {guest.name}"
        # "linux-image-6.1.0-56-amd64 (= 6.1.192-2)"
        depends = tools.run(KernelUnusable, asked, ["dpkg-deb", "-f", meta, "Depends"])
        name = depends.decode().split()[0]
        unpack(fetch([name], release=guest.release, say=say), directory)
        if not os.path.exists(os.path.join(directory, "lib")):
            os.symlink("usr/lib", os.path.join(directory, "lib"))
        versions = os.listdir(os.path.join(directory, "lib/modules"))
        if len(versions) != 1:
            raise KernelUnusable(asked, found=f"{len(versions)} versions in the package {name}")
        kernel = cls(directory, versions[0])
        tools.run(KernelUnusable, asked, ["depmod", "-b", directory, kernel.version])
        return kernel

    def image(self) -> bytes:
        """The kernel, as an ELF file.

        Raises:
            KernelUnusable: it is compressed in a way that is not known here.
        """
        [path] = glob.glob(os.path.join(glob.escape(self.directory), "boot/vmlinuz-*"))
        with open(path, "rb") as file:
            return decompress_image(file.read(), path)

    def modules(self, names: Iterable[str]) -> dict[str, bytes]:
        """Kernel modules with all that they depend on, in an order in which they can be loaded.

        Args:
            names: which; those that are built into the kernel are left out.

        Returns:
            Their contents, by path below ``lib/modules/VERSION``.

        Raises:
            KernelUnusable: the kernel has no such module.
        """
        found: dict[str, bytes] = {}
        home = os.path.join(self.directory, "lib/modules", self.version)
        for name in names:
            shown = tools.run(
                KernelUnusable,
                f"the module {name} of the kernel {self.version}",
                ["modprobe", "-d", self.directory, "-S", self.version, "--show-depends", name],
            )
            # "insmod /…/lib/modules/6.1.0-56-amd64/kernel/fs/9p/9p.ko", "builtin virtio_pci"
            for line in shown.decode().splitlines():
                verb, _, path = line.strip().partition(" ")
                place = os.path.relpath(os.path.realpath(path), os.path.realpath(home))
                if verb == "insmod" and place.removesuffix(".xz") not in found:
                    with open(path, "rb") as file:
                        data = file.read()
                    compressed = place.endswith(".xz")
                    found[place.removesuffix(".xz")] = lzma.decompress(data) if compressed else data
        return found


def decompress_image(image: bytes, name: str) -> bytes:
    """The kernel in a bzImage.

    Args:
        image: the bzImage.
        name: what it is called, for messages.

    Returns:
        An ELF file.

    Raises:
        KernelUnusable: it is no bzImage, or compressed in a way that is not known here.
    """
    asked = f"the kernel in {name}"
    at, magic = _MAGIC
    if image[at : at + len(magic)] != magic:
        raise KernelUnusable(asked, found="no boot header of Linux")
    offset, length = struct.unpack_from("<II", image, _PAYLOAD)
    start = ((image[_SETUP_SECTORS] or 4) + 1) * _SECTOR + offset
    payload = image[start : start + length]
    if payload.startswith(_XZ):
        # After it comes its size, which is no part of the format.
        try:
            return lzma.LZMADecompressor().decompress(payload)
        except lzma.LZMAError as error:
            raise KernelUnusable(asked, found=f"no xz: {error}") from error
    if payload.startswith(_ZSTD):
        return tools.run(KernelUnusable, asked, ["zstd", "-dcq"], data=payload[:-4])
    raise KernelUnusable(asked, found=f"a compression that begins with {payload[:4].hex()}")
