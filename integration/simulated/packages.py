"""Download and unpack Debian packages as data, without installing them.

A simulated node consists of NVIDIA's own driver files, which Debian has in the component
``non-free``. Installing them would change the machine (and a driver package needs a kernel module),
so we fetch them separately:

    debs = fetch(["libcuda1", "nvidia-smi"])
    unpack(debs, "/somewhere/driver-files")

Rules
- The archive is the machine's own (:mod:`integration.simulated.archive`).
- apt uses private lists, cache and status in the cache directory. So nothing on the system changes,
  and installed or pinned packages do not influence the chosen version.
- A package is in the cache if its file is: files are moved there only after apt has checked their
  hash. If all requested packages are there, we do not use the network.
- Packages of one request come from one state of the archive: if one is missing, outdated ones are
  downloaded again.

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
// Images of containers turn these off, and apt would parse the lists again in each call.
Dir::Cache::pkgcache "pkgcache.bin";
Dir::Cache::srcpkgcache "srcpkgcache.bin";
APT::Update::Error-Mode "any";
// The cache may be below a home that the user _apt cannot enter; apt would warn and run as root.
APT::Sandbox::User "root";
// Do not run the machine's hooks, which are for its own lists.
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
"""


def default_cache() -> str:
    """Return the directory of packages: the checkout's ``.cache/packages``.

    Returns:
        An absolute path. For an installed tree it is below ``/var/cache``.
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
    lists: str = "",
    say: Callable[[str], None] | None = None,
) -> list[str]:
    """Return the packages ``names`` as files; download those that are missing.

    Args:
        into: the cache directory, created if missing; by default :func:`default_cache`.
        sources: deb822 text of the archive to use instead of the machine's own.
        architecture: Debian's name of their architecture ("i386"); the machine's own if empty.
        lists: the directory of apt's lists, which caches of one archive may share; in the cache
            directory by default.
        say: receives a line about each download.

    Returns:
        The path of one .deb for each name, in the order of the names.

    Raises:
        ArchiveNotFound: the machine's apt configuration names no archive.
        ArchiveUnreachable: a package is missing and the archive's lists cannot be read.
        PackageNotFound: the archive has no such package.
        DownloadFailed: a package was not downloaded completely.
    """
    wanted = list(dict.fromkeys(names))
    into = os.path.abspath(into or default_cache())
    os.makedirs(into, exist_ok=True)
    with locked(into):
        present = {name: in_cache(name, into) for name in wanted}
        if None in present.values():
            lists = lists or os.path.join(into, "apt")
            apt = Apt.prepare(lists, sources or machine_sources(), wanted, architecture)
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
    """Replace ``directory`` with the files of ``debs``.

    If an earlier call did that with the same files, nothing happens. This is recorded in a file
    next to it, whose name is that of ``directory`` with ``.from`` appended.

    Args:
        debs: paths of .deb files.
        directory: the target; its parent is created, its previous contents are replaced.
        finish: called with the new directory before the files count as unpacked.

    Raises:
        UnpackFailed: a file is not a package, or there is no room; ``directory`` is unchanged.
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
                        f"to unpack {os.path.basename(deb)}",
                        found=complaint(done.stderr),
                        do=f"make room below {parent}, or remove {deb}; it is then fetched again",
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

    conf: str  # the path of its configuration

    @classmethod
    def prepare(cls, root: str, sources: str, names: Sequence[str], architecture: str = "") -> Apt:
        """Download the lists of an archive.

        Args:
            root: the directory for them.
            sources: deb822 text of the archive.
            names: the packages to fetch later.
            architecture: see :func:`fetch`.

        Raises:
            ArchiveUnreachable: the lists cannot be read.
        """
        for directory in ("lists/partial", "cache/archives/partial"):
            os.makedirs(os.path.join(root, directory), exist_ok=True)
        apt = cls(os.path.join(root, "apt.conf"))
        conf = _APT_CONF.format(root=root)
        if architecture:
            conf += f'APT::Architecture "{architecture}";\n'
            conf += f'APT::Architectures {{ "{architecture}"; }};\n'
        with locked(os.path.join(root, "lists")):
            for name, text in (("status", ""), ("archive.sources", sources), ("apt.conf", conf)):
                path = os.path.join(root, name)
                # apt parses its lists again if one of these is newer.
                if not os.path.exists(path) or read(path) != text:
                    _write(path, text)
            # The next call parses the lists if they have changed; an update always would.
            done = apt.run("update", "-o", "pkgCacheFile::Generate=false")
        if done.returncode:
            raise ArchiveUnreachable(
                f"to read the archive's lists for {_some(names)}",
                found=complaint(done.stderr),
                do="check the network and `apt-get update`",
            )
        return apt

    def run(self, *arguments: str, cwd: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run apt-get until it exits."""
        return run(["apt-get", "-c", self.conf, "-q", *arguments], cwd=cwd)

    def resolve(self, names: Sequence[str], *verb: str) -> dict[str, str]:
        """Return the file name of the newest version of each package, by package name.

        Args:
            names: package names.
            verb: an apt-get command; "download" by default.

        Raises:
            PackageNotFound: there is no such package.
        """
        with locked(os.path.join(os.path.dirname(self.conf), "lists")):
            done = self.run(*(verb or ("download",)), "--print-uris", *names)
        if done.returncode:
            raise PackageNotFound(
                f"to fetch {_some(names)}",
                found=complaint(done.stderr),
                do="check the name, and that the archive has the component non-free",
            )
        # 'uri' libcuda1_535.261.03-1_amd64.deb 16452532 SHA256:…
        files = [
            line.split("' ")[1].split()[0] for line in done.stdout.splitlines() if "' " in line
        ]
        return {file.split("_")[0]: file for file in files}

    def download(self, names: Sequence[str], into: str) -> None:
        """Download packages and remove other versions of them.

        Raises:
            DownloadFailed: a package was not downloaded completely.
        """
        with _workplace(".download-", into) as work:
            done = self.run("download", *names, cwd=work)
            if done.returncode:
                raise DownloadFailed(
                    f"to download {_some(names)}",
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
    # Without glob, which compiles a pattern for each name: a node of tests asks for dozens.
    try:
        names = os.listdir(cache)
    except OSError:
        return []
    found = (each for each in names if each.startswith(f"{name}_") and each.endswith(".deb"))
    return [os.path.join(cache, each) for each in found]


def in_cache(name: str, cache: str) -> str | None:
    """Return the file of a package; None if there is none."""
    # There are two only if a process was killed while it replaced one by the other.
    found = _versions(name, cache)
    return found[0] if len(found) == 1 else None


def _some(names: Sequence[str]) -> str:
    few = 3
    rest = f" and {len(names) - few} more" if len(names) > few else ""
    return ", ".join(names[:few]) + rest


# --- Files and programs ------------------------------------------------------------------


@contextlib.contextmanager
def _workplace(prefix: str, directory: str) -> Iterator[str]:
    """Yield a directory for unfinished work; the caller has locked ``directory``.

    So any other directory with the prefix was left behind by a killed process, and is removed.
    """
    for left in glob.glob(os.path.join(glob.escape(directory), f"{prefix}*")):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=directory) as work:
        yield work


@contextlib.contextmanager
def locked(directory: str) -> Iterator[None]:
    """Lock ``directory`` against other processes that fetch or unpack into it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(path: str, text: str) -> None:
    # A path in it may be of any bytes.
    with open(path + ".new", "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
    os.rename(path + ".new", path)
