"""Find the package archive of this machine.

Rules
- We use the archive that apt is configured with for the machine's own release, including proxy,
  credentials and keys, and only add components. No mirror is hard-coded.
- Other entries (vendors, backports) are left out: their packages would not fit, and a broken entry
  would make apt fail.

Source: sources.list(5), deb822(5), apt-config(8).
"""

from __future__ import annotations

import glob
import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from typing import Final

from integration.simulated.errors import ArchiveNotFound

COMPONENTS: Final = ("contrib", "non-free")

# We decide which lists apt downloads, not the machine's entry.
_OURS: Final = frozenset({
    "types", "enabled", "architectures", "languages", "targets",
    *(f"{name}{sign}" for name in ("arch", "lang", "target") for sign in ("", "+", "-")),
})  # fmt: skip

# An entry of the apt configuration: deb822 fields by lower-case name, values verbatim.
Archive = dict[str, str]


def machine_sources(components: Sequence[str] = COMPONENTS) -> str:
    """Return the archives of this machine's own release, with ``components`` added.

    Args:
        components: what to add to each entry that has ``main``.

    Returns:
        deb822 text for a ``.sources`` file.

    Raises:
        ArchiveNotFound: no archive is configured, or apt is not installed.
    """
    asked = "to find this machine's package archive"
    done = run(["apt-config", "shell", "LIST", "Dir::Etc::sourcelist/f", "PARTS",
                 "Dir::Etc::sourceparts/d"])  # fmt: skip
    if done.returncode:
        raise ArchiveNotFound(asked, found=complaint(done.stderr), do="run this on Debian")
    where = dict(pair.split("=", 1) for pair in shlex.split(done.stdout))
    parts = os.path.join(where["PARTS"], "*")
    entries: list[Archive] = []
    for path in [where["LIST"], *sorted(glob.glob(parts))]:
        if path.endswith(".sources"):
            entries += read_deb822(read(path))
        elif path.endswith(".list"):
            entries += read_one_line(read(path))
    own = own_release(entries, machine_release())
    if not own:
        raise ArchiveNotFound(
            asked,
            found=f"no entry for this release with component main in {where['LIST']} or {parts}",
            do="add Debian's archive to the apt configuration",
        )
    return write_deb822(own, components)


def read_deb822(text: str) -> list[Archive]:
    """Return the enabled binary archives of a ``.sources`` file.

    Args:
        text: stanzas of fields, separated by empty lines.

    Returns:
        One value for each stanza that apt would read.
    """
    archives = []
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    for stanza in re.split(r"\n(?:[ \t]*\n)+", "\n".join(lines)):
        fields: dict[str, str] = {}
        name = ""
        for line in stanza.splitlines():
            if line[:1] in " \t" and name:
                fields[name] += "\n" + line
            elif ":" in line:
                name, _, value = line.partition(":")
                name = name.strip().lower()
                fields[name] = value.strip()
        enabled = fields.get("enabled", "yes").lower() not in {"no", "false", "0", "off", "without"}
        if enabled and "deb" in fields.get("types", "").split():
            archives.append({k: v for k, v in fields.items() if k not in _OURS})
    return archives


def read_one_line(text: str) -> list[Archive]:
    """Return the binary archives of a ``.list`` file.

    Args:
        text: lines of ``deb [option=value …] uri suite component…``.

    Returns:
        One value for each line that apt would read; CD-ROMs are left out.
    """
    archives = []
    line_of_deb = re.compile(r"deb\s+(?:\[(?P<options>[^]]*)\]\s*)?(?P<rest>[^#]*)")
    for line in text.splitlines():
        if (match := line_of_deb.match(line.strip())) is None:
            continue
        words = match["rest"].split()
        if len(words) < len(("uri", "suite")) or words[0].startswith("cdrom:"):
            continue
        uri, suite, *components = words
        options = (option.partition("=") for option in (match["options"] or "").split())
        archive = {"uris": uri, "suites": suite, "components": " ".join(components)}
        archive |= {name.lower(): value for name, _, value in options}
        archives.append({k: v for k, v in archive.items() if k not in _OURS})
    return archives


def own_release(archives: Iterable[Archive], codename: str) -> list[Archive]:
    """Return the archives of the machine's own release, its updates and security fixes.

    Args:
        codename: the release ("bookworm"); empty if unknown.

    Returns:
        Archives with only the release's suites.
    """
    wanted = {codename, f"{codename}-updates", f"{codename}-security"}
    own = []
    for archive in archives:
        suites = [
            suite
            for suite in archive.get("suites", "").split()
            if not codename or suite.split("/")[0] in wanted
        ]
        if suites and "main" in archive.get("components", "").split():
            own.append({**archive, "suites": " ".join(suites)})
    return own


def without_updates(archives: Iterable[Archive]) -> list[Archive]:
    """Return the archives of a release itself, without its updates and security fixes."""
    alone = []
    for archive in archives:
        suites = archive.get("suites", "").split()
        suites = [suite for suite in suites if not suite.endswith(("-updates", "-security"))]
        if suites:
            alone.append({**archive, "suites": " ".join(suites)})
    return alone


def write_deb822(archives: Iterable[Archive], components: Sequence[str]) -> str:
    """Return the text of a ``.sources`` file with ``components`` added to each archive.

    Returns:
        deb822 text that requests package lists only, no translations or icons.
    """
    stanzas = []
    for archive in archives:
        all_of_it = dict.fromkeys((*archive["components"].split(), *components))
        fields = {
            "types": "deb", **archive, "components": " ".join(all_of_it), "targets": "Packages",
        }  # fmt: skip
        stanzas.append("".join(f"{name.title()}: {value}\n" for name, value in fields.items()))
    return "\n".join(stanzas)


def machine_release() -> str:
    """Return the release of this machine ("bookworm"); empty if unknown."""
    os_release = read("/etc/os-release")
    match = re.search(r"^VERSION_CODENAME=[\"']?([\w-]+)", os_release, re.MULTILINE)
    return match[1] if match else ""


def complaint(stderr: str) -> str:
    """Return a tool's error message, without its warnings and its prefix."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("E: ") for line in lines if line.startswith("E: ")]
    return (errors or lines or ["no error message"])[0]


def run(argv: Sequence[str], cwd: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run one of apt's and dpkg's programs; return 127 if it is not installed."""
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    try:
        return subprocess.run(
            argv, cwd=cwd, env=environment, capture_output=True, text=True, check=False,
            errors="surrogateescape",
        )  # fmt: skip
    except FileNotFoundError:
        return subprocess.CompletedProcess(argv, 127, "", f"E: {argv[0]} is not installed")


def read(path: str) -> str:
    """Return the text of a file; empty if it does not exist."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return ""
