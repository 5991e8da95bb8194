"""Debian packages that are only data: downloaded and unpacked, never installed.

The simulated node is made of NVIDIA's own driver files, which Debian has in its component
``non-free``; the images of tests are made of others. Installing them would change the machine
(and a driver package would ask for a kernel module), so they are fetched beside the system:

    debs = fetch(["libcuda1", "nvidia-smi"])
    unpack(debs, "/somewhere/driver-files")

Programs of another release of Debian are had the same way, with the libraries they need::

    debs = fetch(["containerd"], "/somewhere/trixie", release="trixie", dependencies=True)

Rules
- The archive is the machine's own (:mod:`integration.simulated.archive`).
- apt's lists, cache and status are private ones in the cache directory, so nothing of the
  system changes, and what is installed or pinned has no say in which version is taken.
- A package is in the cache when its file is, because a file is moved there only when apt has
  checked its hash. If all that is asked for is there, nothing is asked of the network.
- Packages that are asked for together come from one state of the archive: when one is missing,
  those that have been superseded meanwhile are fetched anew.
- A cache directory holds packages of one release.

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

_KEYRING_PACKAGE: Final = "debian-archive-keyring"
_KEYRING: Final = "usr/share/keyrings/debian-archive-keyring.gpg"

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
    release: str | None = None,
    dependencies: bool = False,
    sources: str | None = None,
    architecture: str = "",
    say: Callable[[str], None] | None = None,
) -> list[str]:
    """Have the packages ``names`` as files, downloading those that are not there yet.

    Args:
        into: the cache directory, made if missing; if not given, :func:`default_cache`, or a
            directory in it that is named after the release or architecture.
        release: the release to take them from ("trixie"); the machine's own if not given.
        dependencies: whether to have what they depend on too, as on a machine that has nothing.
        sources: deb822 text of the archive to use in place of the machine's own.
        architecture: Debian's name of theirs ("i386"); the machine's own if empty.
        say: told in one line what is being downloaded, when something is.

    Returns:
        The path of one .deb for each name, in the order of the names; then those of what they
        depend on.

    Raises:
        ArchiveNotFound: the machine's apt configuration names no archive.
        ArchiveUnreachable: something is missing and the archive's lists cannot be read.
        PackageNotFound: the archive has no such package.
        DownloadFailed: a package did not come whole.
    """
    wanted = list(dict.fromkeys(names))
    into = os.path.abspath(into or os.path.join(default_cache(), release or architecture))
    os.makedirs(into, exist_ok=True)
    # What the archive said that they depend on: the question first, then the answer.
    note, question = os.path.join(into, "dependencies"), f"{' '.join(wanted)}\n"
    with _locked(into):
        known = wanted
        if dependencies:
            asked, _, answer = read(note).partition("\n")
            known = answer.split() if f"{asked}\n" == question else []
        present = {name: _in_cache(name, into) for name in known}
        if not known or None in present.values():
            if sources is None:
                sources = sources_of(release, say)
            apt = _Apt.prepare(into, sources, wanted, architecture)
            files = apt.resolve(wanted, dependencies=dependencies)
            present = {
                name: _in_cache(name, into) if os.path.exists(os.path.join(into, file)) else None
                for name, file in files.items()
            }
            missing = [name for name, path in present.items() if path is None]
            if missing:
                if say is not None:
                    of = f" of {release}" if release else ""
                    say(f"downloading {len(missing)} package{'s' * (len(missing) > 1)}{of}")
                apt.download(missing, into)
            present = {name: _in_cache(name, into) for name in files}
            if dependencies:
                _write(note, question + "".join(f"{name}\n" for name in files))
    return [path for path in present.values() if path is not None]


def sources_of(release: str | None, say: Callable[[str], None] | None = None) -> str:
    """The machine's archive, for its own or for another release.

    Args:
        release: the release ("trixie"); None for the machine's own, with all components.
        say: told in one line what is being downloaded, when something is.

    Returns:
        deb822 text for a ``.sources`` file.

    Raises:
        PackagesError: there is no archive, or the keys of that release cannot be had.
    """
    if release is None:
        return machine_sources()
    # A machine that was installed before that release does not know its keys; the newest
    # keyring of the machine's own release does, and comes signed with keys that it knows.
    cache = os.path.join(default_cache(), "keyring")
    keyring = os.path.join(cache, "unpacked")
    unpack(fetch([_KEYRING_PACKAGE], cache, say=say), keyring)
    return machine_sources((), release=release, keyring=os.path.join(keyring, _KEYRING))


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
    with _locked(parent):
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
class _Apt:
    """apt-get with a private configuration and fresh lists."""

    conf: str

    @classmethod
    def prepare(cls, cache: str, sources: str, names: Sequence[str], architecture: str) -> _Apt:
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
        return run(["apt-get", "-c", self.conf, "-q", *arguments], cwd=cwd)

    def resolve(self, names: Sequence[str], *, dependencies: bool) -> dict[str, str]:
        """The file name of the newest version of each package, in the order of the names."""
        verb = ["download"]
        if dependencies:  # nothing is installed, says our status file
            verb = ["install", "--yes", "--no-install-recommends"]
        done = self.run(*verb, "--print-uris", *names)
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
        by_name = {file.split("_")[0]: file for file in files}
        return {name: by_name[name] for name in (*names, *sorted(by_name))}

    def download(self, names: Sequence[str], into: str) -> None:
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


def _in_cache(name: str, cache: str) -> str | None:
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
def _locked(directory: str) -> Iterator[None]:
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
