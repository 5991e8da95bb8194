"""The guest's root: installed packages, and one unit that runs the job.

The guest boots into a target of its own, which has what every system has (basic.target: udev,
the journal, D-Bus on demand) and the job, and none of what a machine with users has. What a
first boot would make or update is masked: it is made each time anew, since nothing is kept.

Source: mmdebstrap(1), systemd.special(7), systemd.exec(5), machine-id(5).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from typing import Final

from tests.tools.errors import RootNotBuilt
from tests.tools.packages import sources_of
from tests.tools.vm import tools
from tests.tools.vm.guests import Guest

TARGET: Final = "nvshim.target"
"""What the guest boots into."""

_JOB: Final = "usr/lib/nvshim/job"

_UNITS: Final = {
    TARGET: """\
[Unit]
Description=The job of this machine
Requires=basic.target nvshim.service
After=basic.target
AllowIsolate=yes
""",
    # A container's process that the kernel kills for want of memory is no fault of the job.
    "nvshim.service": f"""\
[Unit]
Description=What this machine was started for
Requires=basic.target
After=basic.target

[Service]
Type=oneshot
ExecStart=/{_JOB}
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

# Of no use here: each costs time, or waits for something that does not come.
_MASKED: Final = (
    "apt-daily-upgrade.timer",
    "apt-daily.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "fstrim.timer",
    "getty@tty1.service",
    "ldconfig.service",
    "serial-getty@ttyS0.service",
    "proc-sys-fs-binfmt_misc.automount",
    "proc-sys-fs-binfmt_misc.mount",
    "systemd-binfmt.service",
    "systemd-boot-random-seed.service",
    "systemd-firstboot.service",
    "systemd-hwdb-update.service",
    "systemd-journal-catalog-update.service",
    "systemd-journal-flush.service",
    "systemd-pcrmachine.service",
    "systemd-pcrphase-sysinit.service",
    "systemd-pcrphase.service",
    "systemd-pstore.service",
    "systemd-random-seed.service",
    "systemd-remount-fs.service",
    "systemd-sysusers.service",
    "systemd-timesyncd.service",
    "systemd-tpm2-setup-early.service",
    "systemd-tpm2-setup.service",
    "systemd-update-done.service",
    "systemd-update-utmp.service",
    "tmp.mount",
)

_NOT_NEEDED: Final = (
    "usr/share/doc/*",
    "usr/share/man/*",
    "usr/share/locale/*",
    "usr/share/info/*",
)

# How the machine's apt reaches the archive. Who may read it is told by files of their own.
_REACH: Final = re.compile(r"^Acquire::(?:https?|Retries)\b.* \"[^\"]*\";$", re.MULTILINE)


def recipe() -> bytes:
    """What a root is made of besides the guest's value."""
    return repr((_UNITS, _MASKED, _NOT_NEEDED, _job())).encode()


def build_root(
    guest: Guest,
    directory: str,
    *,
    modules: Mapping[str, bytes],
    version: str,
    builtin: str,
    say: Callable[[str], None],
) -> None:
    """Make a guest's root.

    Args:
        guest: whose.
        directory: where; it must not exist.
        modules: kernel modules by path below ``lib/modules/VERSION``.
        version: the kernel's.
        builtin: the directory with the kernel's lists of what is built into it.
        say: told what is being done.

    Raises:
        PackagesError: the machine's apt configuration names no archive.
        ToolMissing: a program is not installed.
        RootNotBuilt: the packages could not be had or not be installed; nothing is left.
    """
    say(f"installing {guest.name} into a directory")
    try:
        install(guest, directory, sources_of(guest.release, say))
        _configure(guest, directory)
        _add_modules(directory, modules, version, builtin)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def install(guest: Guest, directory: str, sources: str) -> None:
    """Install a guest's packages into a directory, without what a machine needs to boot.

    Args:
        guest: whose.
        directory: where; it must not exist.
        sources: deb822 text of the archive.

    Raises:
        ToolMissing: a program is not installed.
        RootNotBuilt: the packages could not be had or not be installed.
    """
    argv = [
        "mmdebstrap", "--variant=minbase", "--mode=root", "--quiet", "--format=directory",
        "--include=" + ",".join(guest.packages),
        '--aptopt=APT::Install-Recommends "false"',
        *(f"--aptopt={line}" for line in _machine_options()),
        *(f"--dpkgopt=path-exclude=/{pattern}" for pattern in _NOT_NEEDED),
        guest.release, directory, "-",
    ]  # fmt: skip
    tools.run(RootNotBuilt, f"the root of {guest.name}", argv, data=sources.encode())


def _machine_options() -> list[str]:
    """What the machine's apt is told of proxies and passwords, as lines of apt.conf."""
    asked = "the machine's apt configuration"
    lines = _REACH.findall(tools.run(RootNotBuilt, asked, ["apt-config", "dump"]).decode())
    argv = ["apt-config", "shell", "FILE", "Dir::Etc::netrc/f", "PARTS", "Dir::Etc::netrcparts/d"]
    shown = tools.run(RootNotBuilt, asked, argv).decode()
    where = dict(pair.split("=", 1) for pair in shlex.split(shown))
    for key, variable in (("netrc", "FILE"), ("netrcparts", "PARTS")):
        if os.path.exists(where.get(variable, "")):
            lines.append(f'Dir::Etc::{key} "{where[variable]}";')
    return lines


def _configure(guest: Guest, directory: str) -> None:
    units = "etc/systemd/system"
    files = {
        # Any id does, but without one the first boot would make it.
        "etc/machine-id": "6e7673686d2d766d2d67756573740001\n",
        "etc/fstab": "",
        "etc/hostname": f"{guest.name}\n",
        "etc/hosts": f"127.0.0.1 localhost {guest.name}\n",
        **{f"{units}/{name}": text for name, text in _UNITS.items()},
    }
    for path, text in files.items():
        _write(os.path.join(directory, path), text.encode())
    _write(os.path.join(directory, _JOB), _job(), mode=0o755)
    for name in _MASKED:
        place = os.path.join(directory, units, name)
        if os.path.lexists(place):
            os.unlink(place)
        os.symlink("/dev/null", place)


def _add_modules(directory: str, modules: Mapping[str, bytes], version: str, builtin: str) -> None:
    home = os.path.join(directory, "usr/lib/modules", version)
    for path, data in modules.items():
        _write(os.path.join(home, path), data)
    for name in ("modules.builtin", "modules.builtin.modinfo", "modules.order"):
        shutil.copyfile(os.path.join(builtin, name), os.path.join(home, name))
    tools.run(RootNotBuilt, "the list of its modules", ["depmod", "-b", directory, version])


def _job() -> bytes:
    with open(os.path.join(os.path.dirname(__file__), "job.sh"), "rb") as file:
        return file.read()


def _write(path: str, data: bytes, *, mode: int = 0o644) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
    os.chmod(path, mode)
