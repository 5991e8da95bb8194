"""Disk and initial root of a guest.

The drivers of the disk and its file system are modules, so a small initial root loads them and
passes on. It is not compressed: the host would gain nothing and the guest lose half a second.

Source: Linux Documentation/driver-api/early-userspace/buffer-format.rst; mke2fs(8).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from typing import Final

from tests.tools.errors import DiskNotBuilt
from tests.tools.vm import tools

MODULES: Final = ("virtio_pci", "virtio_blk", "ext4")
"""What the initial root has to load."""

# Room for what tests write: snapshots of containers, mostly.
_SPARE_MIB: Final = 1024
_MIB: Final = 1 << 20

_INIT: Final = """\
#!/busybox sh
/busybox mount -t devtmpfs none /dev
for module in {modules}; do /busybox insmod /$module; done
until [ -b /dev/vda ]; do /busybox usleep 10000; done
/busybox mount -t ext4 -o rw,noatime /dev/vda /root
/busybox mount -o move /dev /root/dev
exec /busybox switch_root /root /lib/systemd/systemd
"""


def recipe() -> bytes:
    """What disk and initial root are made of besides the root and the kernel."""
    return repr((_INIT, MODULES, _SPARE_MIB)).encode()


def build_initrd(path: str, *, busybox: str, modules: Mapping[str, bytes]) -> None:
    """Write an initial root.

    Args:
        path: the file.
        busybox: a static busybox of the guest.
        modules: what is loaded, in order, by any path.

    Raises:
        DiskNotBuilt: it could not be written.
    """
    with tempfile.TemporaryDirectory(prefix="nvshim-initrd-") as tree:
        for name in ("dev", "root"):
            os.mkdir(os.path.join(tree, name))
        shutil.copyfile(busybox, os.path.join(tree, "busybox"))
        names = {os.path.basename(place): data for place, data in modules.items()}
        for name, data in names.items():
            with open(os.path.join(tree, name), "wb") as file:
                file.write(data)
        with open(os.path.join(tree, "init"), "w", encoding="utf-8") as init:
            init.write(_INIT.format(modules=" ".join(names)))
        for name in ("busybox", "init"):
            os.chmod(os.path.join(tree, name), 0o700)
        listed = "".join(f"{name}\n" for name in sorted(os.listdir(tree)))
        archive = tools.run(
            DiskNotBuilt,
            f"the initial root {path}",
            ["cpio", "--quiet", "--create", "--format=newc", "--owner=0:0"],
            data=listed.encode(),
            cwd=tree,
        )
    with open(path, "wb") as out:
        out.write(archive)


def build_disk(path: str, *, root: str) -> None:
    """Write a disk with the files of a directory.

    Args:
        path: the file, which is sparse.
        root: the directory.

    Raises:
        DiskNotBuilt: it could not be written.
    """
    used = tools.run(DiskNotBuilt, f"the size of {root}", ["du", "-sm", root])
    size = int(used.split()[0]) * 5 // 4 + _SPARE_MIB
    with open(path, "wb") as file:
        file.truncate(size * _MIB)
    argv = ["mke2fs", "-q", "-F", "-t", "ext4", "-O", "^has_journal,^metadata_csum", "-m", "0",
            "-d", root, path]  # fmt: skip
    tools.run(DiskNotBuilt, f"the disk {path}", argv)
