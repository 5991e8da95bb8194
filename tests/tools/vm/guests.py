"""The guests, as values."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Final

from tests.tools.errors import GuestUnknown

# What tests run in a guest, or need of it.
_PACKAGES: Final = (
    "busybox-static",
    "containerd",
    "criu",
    "crun",
    "dbus",
    "gcc",  # tests make images and programs of their own
    "iproute2",
    "iptables",  # criu locks the network with it
    "kmod",
    "libc6-dev",
    "procps",
    "python3",
    "runc",
    "strace",
    "systemd",
    "systemd-sysv",
    "udev",
)

# With what each of them depends on. The diag modules are criu's.
_MODULES: Final = (
    "9p",
    "9pnet_virtio",
    "af_packet_diag",
    "autofs4",
    "bridge",
    "configfs",
    "fuse",
    "inet_diag",
    "iptable_filter",
    "ip6table_filter",
    "loop",
    "netlink_diag",
    "nf_conntrack_netlink",
    "nf_tables",
    "nft_compat",
    "overlay",
    "raw_diag",
    "tcp_diag",
    "tun",
    "udp_diag",
    "unix_diag",
    "veth",
    "xt_mark",
)


@dataclass(frozen=True, slots=True)
class Guest:
    """A release of Debian and what is installed of it."""

    name: str  # how people call it ("debian-12")
    release: str  # its codename ("bookworm")
    python: str  # the version of its Python ("3.11")
    # what is installed, besides what each release has at least
    packages: tuple[str, ...] = _PACKAGES
    modules: tuple[str, ...] = _MODULES  # the kernel modules that can be loaded
    memory: int = 1024  # of the machine, in MiB

    def key(self, *more: bytes) -> str:
        """A name for what is made of this value.

        Args:
            more: whatever else it is made of.

        Returns:
            16 hexadecimal digits.
        """
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        for part in more:
            digest.update(b"\0" + part)
        return digest.hexdigest()[:16]


GUESTS: Final = {
    guest.name: guest
    for guest in (
        Guest("debian-12", "bookworm", "3.11"),
        Guest("debian-13", "trixie", "3.13"),
    )
}


def find_guest(name: str) -> Guest:
    """The guest of that name.

    Args:
        name: one of :data:`GUESTS`.

    Raises:
        GuestUnknown: there is none.
    """
    guest = GUESTS.get(name)
    if guest is None:
        raise GuestUnknown(
            f"guest {name}", found="none of that name", do=f"use one of {', '.join(GUESTS)}"
        )
    return guest
