"""Debian packages that are only data: downloaded and unpacked, never installed.

The simulated node is made of NVIDIA's own driver files, which Debian has in its component
``non-free``. Installing them would change the machine (and a driver package would ask for a kernel
module), so they are fetched beside the system:

    debs = fetch(["libcuda1", "nvidia-smi"])
    unpack(debs, "/somewhere/driver-files")

Rules
- The archive is the machine's own (:mod:`integration.simulated.archive`).
- apt's lists, cache and status are private ones in the cache directory, so nothing of the
  system changes, and what is installed or pinned has no say in which version is taken.
- A package is in the cache when its file is, because a file is moved there only when apt has
  checked its hash. If all that is asked for is there, nothing is asked of the network.
- Packages that are asked for together come from one state of the archive: when one is missing,
  those that have been superseded meanwhile are fetched anew.

Source: apt.conf(5), apt-get(8).
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from integration.simulated.archive import complaint, machine_sources, read, run
from integration.simulated.errors import (
    ArchiveUnreachable,
    DownloadFailed,
    PackageNotFound,
    UnpackFailed,
)

_APT_CONF: Final = """\
Dir::Etc::sourcelist "{root}/archive.sources";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
Dir::State::lists "{root}/lists";
Dir::State::status "{root}/status";
Dir::Cache "{root}/cache";
APT::Update::Error-Mode "any";
// The cache may be below a home that the user _apt cannot enter; apt would warn, and go on as root.
APT::Sandbox::User "root";
// What the machine wants to be told after an update of its own lists is not for these.
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
"""


def default_cache() -> str:
    """The directory that packages are kept in: the checkout's ``.cache/packages``.

    Returns:
        An absolute path. Where the project is installed and not a checkout, one below
        ``/var/cache``.
    """
    checkout = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if os.path.exists(os.path.join(checkout, "pyproject.toml")):
        return os.path.join(checkout, ".cache", "packages")
    return "/var/cache/containerd-shim-nvidia/packages"


def fetch(
    names: Iterable[str],
    into: str | None = None,
    *,
    sources: str | None = None,
    architecture: str = "",
    say: Callable[[str], None] | None = None,
) -> list[str]:
    """Have the packages ``names`` as files, downloading those that are not there yet.

    Args:
        into: the cache directory, made if missing; if not given, :func:`default_cache`.
        sources: deb822 text of the archive to use in place of the machine's own.
        architecture: Debian's name of theirs ("i386"); the machine's own if empty.
        say: told in one line what is being downloaded, when something is.

    Returns:
        The path of one .deb for each name, in the order of the names.

    Raises:
        ArchiveNotFound: the machine's apt configuration names no archive.
        ArchiveUnreachable: something is missing and the archive's lists cannot be read.
        PackageNotFound: the archive has no such package.
        DownloadFailed: a package did not come whole.
    """
    wanted = list(dict.fromkeys(names))
    into = os.path.abspath(into or default_cache())
    os.makedirs(into, exist_ok=True)
    with locked(into):
        present = {name: in_cache(name, into) for name in wanted}
        if None in present.values():
            apt = Apt.prepare(into, sources or machine_sources(), wanted, architecture)
            files = apt.resolve(wanted)
            missing = [
                name
                for name in wanted
                if present[name] is None or not os.path.exists(os.path.join(into, files[name]))
            ]
            if missing:
                if say is not None:
                    say(f"downloading {len(missing)} package{'s' * (len(missing) > 1)}")
                apt.download(missing, into)
            present = {name: in_cache(name, into) for name in wanted}
    return [path for path in present.values() if path is not None]


def unpack(
    debs: Sequence[str], directory: str, *, finish: Callable[[str], None] | None = None
) -> None:
    """Make ``directory`` the files of ``debs``, nothing more and nothing less.

    Already so by an earlier call with the same files: nothing is done. A file ``directory``
    with ``.from`` appended remembers that.

    Args:
        debs: paths of .deb files.
        directory: where to; its parent is made, what stood there before is replaced.
        finish: what else is to be done with the files before they count as unpacked; told
            where they are while it is done.

    Raises:
        UnpackFailed: a file is no package, or there is no room; ``directory`` is as it was.
    """
    directory = os.path.abspath(directory)
    parent, stamp = os.path.dirname(directory), directory + ".from"
    contents = "".join(f"{os.path.basename(deb)}\n" for deb in debs)
    os.makedirs(parent, exist_ok=True)
    with locked(parent):
        if os.path.isdir(directory) and read(stamp) == contents:
            return
        with _workplace(".unpack-", parent) as work:
            new = os.path.join(work, "new")
            os.mkdir(new, 0o755)
            for deb in debs:
                done = run(["dpkg-deb", "-x", deb, new], cwd=work)
                if done.returncode:
                    raise UnpackFailed(
                        f"unpack {os.path.basename(deb)}",
                        found=complaint(done.stderr),
                        do=f"look for room below {parent}, or remove {deb} to have it fetched anew",
                    )
            if finish is not None:
                finish(new)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(stamp)
            if os.path.lexists(directory):
                os.rename(directory, os.path.join(work, "old"))
            os.rename(new, directory)
            _write(stamp, contents)


# --- apt ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Apt:
    """apt-get with a private configuration and fresh lists."""

    conf: str  # where its configuration is

    @classmethod
    def prepare(cls, cache: str, sources: str, names: Sequence[str], architecture: str = "") -> Apt:
        """Have the lists of an archive.

        Args:
            cache: the directory of packages, which nobody else uses meanwhile.
            sources: deb822 text of the archive.
            names: what is going to be asked for.
            architecture: as of :func:`fetch`.

        Raises:
            ArchiveUnreachable: the lists cannot be read.
        """
        root = os.path.join(cache, "apt")
        for directory in ("lists/partial", "cache/archives/partial"):
            os.makedirs(os.path.join(root, directory), exist_ok=True)
        _write(os.path.join(root, "status"), "")
        _write(os.path.join(root, "archive.sources"), sources)
        apt = cls(os.path.join(root, "apt.conf"))
        conf = _APT_CONF.format(root=root)
        if architecture:
            conf += f'APT::Architecture "{architecture}";\n'
            conf += f'APT::Architectures {{ "{architecture}"; }};\n'
        _write(apt.conf, conf)
        done = apt.run("update")
        if done.returncode:
            raise ArchiveUnreachable(
                f"read the archive's lists to fetch {_some(names)}",
                found=complaint(done.stderr),
                do="check the network and `apt-get update`",
            )
        return apt

    def run(self, *arguments: str, cwd: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run apt-get to its end."""
        return run(["apt-get", "-c", self.conf, "-q", *arguments], cwd=cwd)

    def resolve(self, names: Sequence[str], *verb: str) -> dict[str, str]:
        """The file name of the newest version of each package, by its name.

        Args:
            names: of packages.
            verb: what apt-get would be to do with them; "download" if nothing.

        Raises:
            PackageNotFound: there is none of a name.
        """
        done = self.run(*(verb or ("download",)), "--print-uris", *names)
        if done.returncode:
            raise PackageNotFound(
                f"fetch {_some(names)}",
                found=complaint(done.stderr),
                do="check the name, and that the archive has the component non-free",
            )
        # 'uri' libcuda1_535.261.03-1_amd64.deb 16452532 SHA256:…
        files = [
            line.split("' ")[1].split()[0] for line in done.stdout.splitlines() if "' " in line
        ]
        return {file.split("_")[0]: file for file in files}

    def download(self, names: Sequence[str], into: str) -> None:
        """Download packages, in place of other versions of them.

        Raises:
            DownloadFailed: one did not come whole.
        """
        with _workplace(".download-", into) as work:
            done = self.run("download", *names, cwd=work)
            if done.returncode:
                raise DownloadFailed(
                    f"download {_some(names)}",
                    found=complaint(done.stderr),
                    do="try again",
                )
            for file in sorted(os.listdir(work)):
                if not file.endswith(".deb"):
                    continue
                os.rename(os.path.join(work, file), os.path.join(into, file))
                for other in _versions(file.split("_", maxsplit=1)[0], into):
                    if os.path.basename(other) != file:
                        os.unlink(other)


def _versions(name: str, cache: str) -> list[str]:
    return glob.glob(os.path.join(glob.escape(cache), f"{glob.escape(name)}_*.deb"))


def in_cache(name: str, cache: str) -> str | None:
    """The file of a package that is there; None if there is none."""
    # There are two only if we were killed while one took the other's place.
    found = _versions(name, cache)
    return found[0] if len(found) == 1 else None


def _some(names: Sequence[str]) -> str:
    few = 3
    rest = f" and {len(names) - few} more" if len(names) > few else ""
    return ", ".join(names[:few]) + rest


# --- Files and programs ------------------------------------------------------------------


@contextlib.contextmanager
def _workplace(prefix: str, directory: str) -> Iterator[str]:
    """A directory for what is not finished yet; ``directory`` is locked by us.

    So what others have left there under the prefix is of processes that were killed.
    """
    for left in glob.glob(os.path.join(glob.escape(directory), f"{prefix}*")):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=directory) as work:
        yield work


@contextlib.contextmanager
def locked(directory: str) -> Iterator[None]:
    """Hold ``directory`` against other processes that fetch or unpack into it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(path: str, text: str) -> None:
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(text)
    os.rename(path + ".new", path)
