"""What a guest boots from and runs with, kept in the cache.

    DIR/root/      its files, with its kernel in boot/; its Python compiles modules for the guest
    DIR/disk.img   a disk with those
    DIR/tools/     the packages that tests need
    DIR/site/      those that the shim needs, and nothing else

Rules
- It boots into a target of its own, which has what every system has (basic.target: udev, the
  journal, D-Bus on demand) and the job, and none of what a machine with users has. What a first
  boot would make or update is masked: it is made each time anew, since nothing is kept.
- The Python packages are had by the host, in the versions and with the hashes of the requirements
  files, and compiled by the guest's own interpreter, which runs on the host beside its libc: in the
  guest it would take minutes.
- A part is made anew when what it is made of has changed: a file beside it says of what it is. A
  part that fails to be made has none. What the archive offers is no part of that; ``make clean``
  forgets everything.

Source: mmdebstrap(1), initramfs-tools(7), systemd.exec(5), mke2fs(8); pip-install(1),
"--python-version"; ld.so(8), "--library-path".
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import re
import shlex
import shutil
import sys
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from integration.simulated.packages import locked
from tools.packages import sources_of
from tools.stamps import read_stamp, write_stamp
from tools.vm import tools

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

TARGET: Final = "nvshim.target"
"""What a guest boots into."""

# What tests run in a guest, or need of it; and what the guest itself needs.
_PACKAGES: Final = (
    "busybox-static", "containerd", "criu", "crun", "gcc", "iproute2", "iptables", "libc6-dev",
    "procps", "python3", "runc", "strace",
    "dbus", "initramfs-tools", "kmod", "linux-image-amd64", "systemd", "systemd-sysv", "udev",
)  # fmt: skip

_JOB: Final = "usr/lib/nvshim/job"
_BESIDE: Final = os.path.dirname(os.path.abspath(__file__))
# The modules of this project, compiled for the guest where they are.
_ROOMS: Final = ("api", "hooks", "integration", "shim", "tests")

_FILES: Final = {
    # Of the initial root, what it needs to find the disk; before the kernel is installed.
    "etc/initramfs-tools/conf.d/nvshim": "MODULES=list\n",
    "usr/share/initramfs-tools/modules.d/nvshim": "virtio_pci\nvirtio_blk\next4\n",
    f"etc/systemd/system/{TARGET}": """\
[Unit]
Description=The job of this machine
Requires=basic.target nvshim.service
After=basic.target
AllowIsolate=yes
""",
    # A container's process that the kernel kills for want of memory is no fault of the job.
    "etc/systemd/system/nvshim.service": f"""\
[Unit]
Description=What this machine was started for
Requires=basic.target
After=basic.target

[Service]
Type=oneshot
ExecStart=/bin/sh /{_JOB}
TimeoutStartSec=infinity
TasksMax=infinity
OOMPolicy=continue
Delegate=yes
Environment=HOME=/root LANG=C.UTF-8
StandardInput=null
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
""",
}
# Any id does, but without one the first boot would make it.
_OF_MACHINE: Final = {
    "etc/machine-id": "6e7673686d2d766d2d67756573740001\n",
    "etc/fstab": "",
    "etc/hostname": "guest\n",
    "etc/hosts": "127.0.0.1 localhost guest\n",
}

# Of no use here: each costs time, or waits for something that does not come.
_MASKED: Final = (
    "apt-daily-upgrade.timer", "apt-daily.timer", "dpkg-db-backup.timer", "e2scrub_all.timer",
    "fstrim.timer", "getty@tty1.service", "ldconfig.service", "serial-getty@ttyS0.service",
    "proc-sys-fs-binfmt_misc.automount", "proc-sys-fs-binfmt_misc.mount", "systemd-binfmt.service",
    "systemd-boot-random-seed.service", "systemd-firstboot.service", "systemd-hwdb-update.service",
    "systemd-journal-catalog-update.service", "systemd-journal-flush.service",
    "systemd-pcrmachine.service", "systemd-pcrphase-sysinit.service", "systemd-pcrphase.service",
    "systemd-pstore.service", "systemd-random-seed.service", "systemd-remount-fs.service",
    "systemd-sysusers.service", "systemd-timesyncd.service", "systemd-tpm2-setup-early.service",
    "systemd-tpm2-setup.service", "systemd-update-done.service", "systemd-update-utmp.service",
    "tmp.mount",
)  # fmt: skip
_NOT_NEEDED: Final = ("doc", "man", "locale", "info")

# Room for what tests write: snapshots of containers, mostly.
_SPARE_MIB: Final = 1024

# How the machine's apt reaches the archive. Who may read it is told by files of their own.
_REACH: Final = re.compile(r"^Acquire::(?:https?|Retries)\b.* \"[^\"]*\";$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Guest:
    """A release of Debian, and where what is made of it is."""

    release: str  # its codename ("bookworm")
    python: str  # the version of its Python ("3.11")
    directory: str  # of its parts

    @property
    def root(self) -> str:
        """Its files."""
        return os.path.join(self.directory, "root")

    @property
    def disk(self) -> str:
        """Its disk, raw."""
        return os.path.join(self.directory, "disk.img")

    @property
    def site(self) -> str:
        """Python packages for the shim."""
        return os.path.join(self.directory, "site")

    @property
    def tools(self) -> str:
        """Python packages for the tests."""
        return os.path.join(self.directory, "tools")

    def boots(self, name: str) -> str:
        """The kernel (``vmlinuz``), or its initial root (``initrd.img``)."""
        [path] = glob.glob(os.path.join(glob.escape(self.root), "boot", f"{name}-*"))
        return path


GUESTS: Final = {"debian-12": ("bookworm", "3.11"), "debian-13": ("trixie", "3.13")}
"""Release and version of Python of each guest, by its name."""


def prepare(name: str, cache: str, repository: str, *, say: Callable[[str], None]) -> Guest:
    """Have a guest ready to be started; what is there already is not made again.

    Args:
        cache: a directory of guests, made if missing.
        repository: the checkout whose requirements and modules it is for.

    Raises:
        GuestNotBuilt: a part could not be made.
        ToolMissing: a program is not installed.
        PackagesError: the machine's apt configuration names no archive.
    """
    guest = Guest(*GUESTS[name], os.path.join(os.path.abspath(cache), name))
    os.makedirs(guest.directory, exist_ok=True)
    with locked(guest.directory):
        recipe = [os.path.join(_BESIDE, each) for each in ("guest.py", "job.sh")]
        with _made(guest.disk, recipe) as stale:
            if stale:
                say(f"installing {name} into a directory")
                shutil.rmtree(guest.root, ignore_errors=True)
                _make_disk(guest, say)
        for part, requirements in ((guest.tools, "-dev"), (guest.site, "")):
            path = os.path.join(repository, f"requirements{requirements}.txt")
            with _made(part, [path]) as stale:
                if stale:
                    say(f"downloading Python packages for {name}")
                    shutil.rmtree(part, ignore_errors=True)
                    _install_python(guest, path, part)
        _compile(guest, [guest.tools, guest.site, *(f"{repository}/{room}" for room in _ROOMS)])
    return guest


@contextlib.contextmanager
def _made(part: str, sources: Iterable[str]) -> Iterator[bool]:
    """Whether a part has to be made anew, which is done in the context."""
    digest = hashlib.sha256()
    for path in sources:
        with open(path, "rb") as file:
            digest.update(file.read())
    stamp = f"{part}.of"
    stale = read_stamp(stamp) != digest.hexdigest()
    if stale:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(stamp)
    yield stale
    write_stamp(stamp, digest.hexdigest())


def _make_disk(guest: Guest, say: Callable[[str], None]) -> None:
    install(guest.release, _PACKAGES, guest.root, files=_FILES, say=say)
    with open(os.path.join(_BESIDE, "job.sh"), encoding="utf-8") as file:
        _write(guest.root, {**_OF_MACHINE, _JOB: file.read()})
    for name in _MASKED:
        place = os.path.join(guest.root, "etc/systemd/system", name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(place)
        os.symlink("/dev/null", place)
    used = int(tools.run(f"the size of {guest.root}", ["du", "-sm", guest.root]).split()[0])
    with open(guest.disk, "wb") as disk:
        disk.truncate((used * 5 // 4 + _SPARE_MIB) << 20)
    argv = ["mke2fs", "-q", "-F", "-t", "ext4", "-O", "^has_journal,^metadata_csum", "-m", "0",
            "-d", guest.root, guest.disk]  # fmt: skip
    tools.run(f"the disk {guest.disk}", argv)


def install(
    release: str,
    packages: Iterable[str],
    directory: str,
    *,
    files: Mapping[str, str] | None = None,
    say: Callable[[str], None] | None = None,
) -> None:
    """Install packages of a release of Debian into a directory.

    Args:
        packages: what is installed, besides what each release has at least.
        directory: where; it must not exist.
        files: what is there before them, by the path.

    Raises:
        PackagesError: the machine's apt configuration names no archive.
        ToolMissing: mmdebstrap is not installed.
        GuestNotBuilt: the packages could not be had or not be installed; nothing is left.
    """
    argv = [
        "mmdebstrap", "--variant=minbase", "--mode=root", "--quiet", "--format=directory",
        "--include=" + ",".join(packages),
        '--aptopt=APT::Install-Recommends "false"',
        *(f"--aptopt={line}" for line in _machine_options()),
        *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in _NOT_NEEDED),
        release, directory, "-",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="nvshim-files-") as before:
        _write(before, files or {})
        argv.insert(1, f'--extract-hook=cp -r {before}/. "$1"')
        try:
            tools.run(f"the packages of {release}", argv, data=sources_of(release, say))
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise


def _machine_options() -> list[str]:
    """What the machine's apt is told of proxies and passwords, as lines of apt.conf."""
    asked = "the machine's apt configuration"
    lines = _REACH.findall(tools.run(asked, ["apt-config", "dump"]))
    argv = ["apt-config", "shell", "FILE", "Dir::Etc::netrc/f", "PARTS", "Dir::Etc::netrcparts/d"]
    where = dict(pair.split("=", 1) for pair in shlex.split(tools.run(asked, argv)))
    for key, variable in (("netrc", "FILE"), ("netrcparts", "PARTS")):
        if os.path.exists(where.get(variable, "")):
            lines.append(f'Dir::Etc::{key} "{where[variable]}";')
    return lines


def _install_python(guest: Guest, requirements: str, directory: str) -> None:
    argv = [
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
        "--no-compile", "--require-hashes", "--only-binary=:all:", "--no-warn-conflicts",
        f"--python-version={guest.python}", "--target", directory, "--requirement", requirements,
    ]  # fmt: skip
    tools.run(f"{requirements} for Python {guest.python}", argv)


def _compile(guest: Guest, directories: Iterable[str]) -> None:
    """Compile what is not compiled yet, as the guest's interpreter does."""
    libraries = f"{guest.root}/usr/lib/x86_64-linux-gnu"
    # Some packages ship templates and old syntax, on which this ends with 1: they stay as they
    # are, and whoever imports one will see why.
    script = "import compileall, sys\nfor d in sys.argv[1:]: compileall.compile_dir(d, quiet=2)\n"
    argv = [
        f"{libraries}/ld-linux-x86-64.so.2", "--library-path", libraries,
        f"{guest.root}/usr/bin/python3", "-S", "-c", script, *directories,
    ]  # fmt: skip
    home = {"PYTHONHOME": f"{guest.root}/usr"}
    tools.run("to compile modules with the guest's Python", argv, environment=home)


def _write(root: str, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = os.path.join(root, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
