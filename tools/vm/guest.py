"""The files that a guest boots from and runs with, kept in the cache.

    DIR/root/      its files, with its kernel in boot/; its Python compiles modules for the guest
    DIR/disk.img   a disk with those
    DIR/tools/     the packages that tests need
    DIR/site/      only the packages that the shim needs

Rules
- It boots into its own target, which contains the basic system (basic.target: udev, the journal,
  D-Bus on demand) and the job, and no services for users. Work of a first boot is masked, because
  it would be repeated each time: nothing is kept.
- The host downloads the Python packages, in the versions and with the hashes of the requirements
  files. The guest's interpreter compiles them, run on the host with its own libc: in the guest it
  would take minutes.
- A part is rebuilt when its inputs have changed, which a stamp file next to it records. A part that
  could not be built has no stamp. The archive's contents do not count as inputs; ``make clean``
  deletes everything.

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
"""The guest's boot target."""

# Packages for tests in the guest, and for the guest itself.
_PACKAGES: Final = (
    "busybox-static", "containerd", "criu", "crun", "gcc", "iproute2", "iptables", "libc6-dev",
    "procps", "python3", "runc", "strace",
    "dbus", "initramfs-tools", "kmod", "linux-image-amd64", "systemd", "systemd-sysv", "udev",
)  # fmt: skip

_JOB: Final = "usr/lib/nvshim/job"
_BESIDE: Final = os.path.dirname(os.path.abspath(__file__))
# The project's modules, which are compiled in place for the guest.
_ROOMS: Final = ("api", "hooks", "integration", "shim", "tests")

_FILES: Final = {
    # Only the modules to find the disk; must exist before the kernel is installed.
    "etc/initramfs-tools/conf.d/nvshim": "MODULES=list\n",
    "usr/share/initramfs-tools/modules.d/nvshim": "virtio_pci\nvirtio_blk\next4\n",
    f"etc/systemd/system/{TARGET}": """\
[Unit]
Description=The job of this machine
Requires=basic.target nvshim.service
After=basic.target
AllowIsolate=yes
""",
    # The kernel's OOM kill of a container's process must not fail the job.
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
# Any id is good; without one, the first boot would create it.
_OF_MACHINE: Final = {
    "etc/machine-id": "6e7673686d2d766d2d67756573740001\n",
    "etc/fstab": "",
    "etc/hostname": "guest\n",
    "etc/hosts": "127.0.0.1 localhost guest\n",
}

# Not needed here: each takes time, or waits for an event that does not happen.
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

# Space for files of tests, mostly snapshots of containers.
_SPARE_MIB: Final = 1024

# The machine's apt settings for the archive's access, and whether a mirror may be out of date.
# Credentials are in separate files.
_REACH: Final = re.compile(
    r"^Acquire::(?:https?|Retries|Check-Valid-Until)\b.* \"[^\"]*\";$", re.MULTILINE
)

DEVELOPMENT: Final = "requirements/dev.txt"
RUNTIME: Final = "requirements/runtime.txt"
"""The files that are installed in a guest, by their path in the repository."""


@dataclass(frozen=True, slots=True)
class Guest:
    """A release of Debian, and the directory of its parts."""

    release: str  # its codename ("bookworm")
    python: str  # the version of its Python ("3.11")
    directory: str  # the directory of its parts

    @property
    def root(self) -> str:
        """Return the directory of its files."""
        return os.path.join(self.directory, "root")

    @property
    def disk(self) -> str:
        """Return its raw disk."""
        return os.path.join(self.directory, "disk.img")

    @property
    def site(self) -> str:
        """Return the directory of Python packages for the shim."""
        return os.path.join(self.directory, "site")

    @property
    def tools(self) -> str:
        """Return the directory of Python packages for the tests."""
        return os.path.join(self.directory, "tools")

    def boots(self, name: str) -> str:
        """Return the kernel (``vmlinuz``), or its initial root (``initrd.img``)."""
        [path] = glob.glob(os.path.join(glob.escape(self.root), "boot", f"{name}-*"))
        return path


GUESTS: Final = {"debian-12": ("bookworm", "3.11"), "debian-13": ("trixie", "3.13")}
"""Release and Python version of each guest, by its name."""


def prepare(name: str, cache: str, repository: str, *, say: Callable[[str], None]) -> Guest:
    """Build the missing parts of a guest, and return it.

    Args:
        cache: the directory of guests, created if missing.
        repository: the checkout with the requirements and modules.

    Raises:
        GuestNotBuilt: a part could not be built.
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
        for part, requirements in ((guest.tools, DEVELOPMENT), (guest.site, RUNTIME)):
            path = os.path.join(repository, requirements)
            with _made(part, [path]) as stale:
                if stale:
                    say(f"downloading Python packages for {name}")
                    shutil.rmtree(part, ignore_errors=True)
                    _install_python(guest, path, part)
        _compile(guest, [guest.tools, guest.site, *(f"{repository}/{room}" for room in _ROOMS)])
    return guest


@contextlib.contextmanager
def _made(part: str, sources: Iterable[str]) -> Iterator[bool]:
    """Yield whether a part must be rebuilt; the caller does that in the context."""
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
    """Install packages of a Debian release into a directory.

    Args:
        packages: the packages, in addition to each release's minimum.
        directory: where; it must not exist.
        files: files to create first, by their path.

    Raises:
        PackagesError: the machine's apt configuration names no archive.
        ToolMissing: mmdebstrap is not installed.
        GuestNotBuilt: the packages could not be downloaded or installed; nothing is left.
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
    """Return the machine's apt settings for proxies and passwords, as lines of apt.conf."""
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
    """Compile modules without bytecode, with the guest's interpreter."""
    libraries = f"{guest.root}/usr/lib/x86_64-linux-gnu"
    # Some packages contain templates and old syntax, so this exits with 1. Such files stay
    # uncompiled, and importing one shows its error.
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
