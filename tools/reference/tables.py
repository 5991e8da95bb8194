"""The pages and tables that each come from a single table in the code."""

from __future__ import annotations

import json
import os
import re
import runpy
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from hooks.node.capabilities import (
    ALWAYS,
    CONTROL,
    FILES,
    NODES,
    ConfigFile,
    Firmware,
    Library,
    Program,
    Row,
    Socket,
    XorgModule,
    wants_drm,
)
from integration.doctor.checks import CHECKS
from integration.inspection.driver_packages import Package, known_packages
from integration.kubernetes.settings import SETTINGS, VARIABLES
from integration.node.faults.xids import NUMBERS, Scope, Severity, about
from integration.node.services.labels import names
from integration.node.settings.table import FLAGS
from tests.matrix import RECORD
from tools import REPOSITORY
from tools.reference.markdown import by_reason, code, prose, table

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "advisories",
    "advisories_elsewhere",
    "capabilities",
    "findings",
    "installer_variables",
    "node_labels",
    "packages",
    "plugin_variables",
    "tested",
    "tested_runs",
    "xids",
]

# -- node labels -------------------------------------------------------------------------------


def node_labels() -> str:
    """Return the labels of a node: of the node, of GPUs and MIG devices, of MIG devices."""
    rows: dict[str, list[str]] = {}
    for prefix, labels in (("", names.NODE), ("gpu.", names.DEVICES), ("mig-PROFILE.", names.MIG)):
        for name, meaning in labels.items():
            both = [f"gpu.{name}", f"mig-PROFILE.{name}"] if labels is names.DEVICES else []
            rows.setdefault(meaning, []).extend(both or [f"{prefix}{name}"])
    return table(("label", "value"), [(", ".join(map(code, n)), why) for why, n in rows.items()])


# -- advisories --------------------------------------------------------------------------------

_ADVISORIES = os.path.join(REPOSITORY, "tests/security/advisories.py")


def advisories() -> str:
    """Return the advisories of other projects, and the tests here."""
    data = runpy.run_path(_ADVISORIES)
    rows = []
    for name, tests in data["COVERED"].items():
        files = dict.fromkeys(os.path.basename(test.partition("::")[0]) for test in tests)
        rows.append((name, prose(data["MECHANISM"][name]), ", ".join(map(code, files))))
    return table(("advisory", "what went wrong", "tests"), rows)


def advisories_elsewhere() -> str:
    """Return the advisories that this project cannot fix, and why."""
    rows = [(name, prose(why)) for name, why in runpy.run_path(_ADVISORIES)["NOT_OURS"].items()]
    return table(("advisory", "why"), rows)


# -- the doctor --------------------------------------------------------------------------------

_FINDINGS: Final = """\
# What the doctor looks for

Run `nvshim doctor` to examine a node, or `nvshim doctor --only CODE` for one of these checks; they
change nothing. `nvshim explain CODE` says what comes of a finding.

An error hurts now: containers do not get their GPUs, or get what they must not. A warning will
hurt, after a reload of systemd, a boot or an update. A note is worth knowing. The exit status is 3
if there is an error.
"""


def findings() -> str:
    """Return the page of all checks."""
    rows = [
        (
            f'<span id="{check.code.lower()}"></span>{code(check.code)}',
            check.severity.value,
            prose(check.title),
            prose(check.remedy) + (f": {code(check.command)}" if check.command else ""),
        )
        for check in sorted(CHECKS, key=lambda check: check.code)
    ]
    head = ("code", "severity", "what is wrong", "what to do")
    return f"{_FINDINGS}\n{table(head, rows)}"


# -- variables ---------------------------------------------------------------------------------

_IGNORED = "NVIDIA's, and nothing here"


def installer_variables() -> str:
    """Return the tables that the installer reads: variables with and without an effect."""
    rows = []
    for setting in SETTINGS:
        value = setting.default
        text = str(value).lower() if isinstance(value, bool) else str(value or "")
        names = ", ".join(map(code, setting.variables))
        rows.append((names, setting.text, code(text) if text else "-"))
    ignored = [(name, known.text) for name, known in VARIABLES.items() if not known.field]
    heeded = table(("variable", "meaning", "if not set"), rows)
    return f"{heeded}\n{by_reason(_IGNORED, ignored)}"


def plugin_variables() -> str:
    """Return the configuration keys that variables set, and ignored variables."""
    named = [(name, flag) for flag in FLAGS for name in flag.variables]
    rows = [(code(name), code(flag.key)) for name, flag in named if not flag.is_ignored]
    ignored = [(name, flag.text) for name, flag in named if flag.is_ignored]
    known = table(("variable", "key of the configuration"), rows)
    return f"{known}\n{by_reason(_IGNORED, ignored)}"


# -- what is tested ----------------------------------------------------------------------------

_NEWEST: Final = "newest"


def _record() -> Mapping[str, Any]:
    with open(RECORD, encoding="utf-8") as file:
        found: Mapping[str, Any] = json.load(file)
    return found


def tested() -> str:
    """Return which containerd has run with which low-level runtime, and when."""
    seen: dict[str, dict[str, str]] = defaultdict(dict)
    for run in _record().values():
        if not run["failed"]:
            seen[run["containerd"]][run["low_level"]] = run["date"]
    rows = [
        (one, ", ".join(sorted(others, key=_order)), max(others.values()))
        for one, others in sorted(seen.items(), key=lambda item: _order(item[0]))
    ]
    return table(("tested", "with", "last on"), rows).rstrip()


def tested_runs() -> str:
    """Return every run, with its figures."""
    rows = [
        (
            f"`{name}`", run["containerd"], run["low_level"], run["date"],
            str(run["passed"]), str(run["failed"]), str(run["skipped"]),
        )
        for name, run in sorted(_record().items(), key=lambda item: (item[0] != _NEWEST, item[0]))
    ]  # fmt: skip
    head = ("run", "containerd", "low-level runtime", "on", "passed", "failed", "skipped")
    return table(head, rows).rstrip()


def _order(program: str) -> tuple[str, list[int]]:
    name, _, version = program.partition(" ")
    return name, [int(part) for part in version.split(".") if part.isdecimal()]


# -- XIDs --------------------------------------------------------------------------------------

_XIDS: Final = """\
# Errors of the driver

Look up an XID from the kernel's log, `nvshim list --health` or an event of the node agent. The
table follows NVIDIA's catalogue; a number that is not here makes a device unhealthy. To change it,
set `xids` in [`[health]`](configuration.md), or, as with NVIDIA's device plugin,
`DP_DISABLE_HEALTHCHECKS` and `DP_ENABLE_HEALTHCHECKS`.
"""

_XIDS_COLUMNS: Final = """\
To put a device back at any time, run `nvshim health clear`.

*of*: on a GPU in MIG mode, the error is that of the instance it names, or of the whole GPU.
*fault*: whose it is, when the end of a container is explained; empty if it ends no container.
"""

# Codes of engines that exist several times.
_NUMBER: Final = re.compile(r" \d+(?=: exception$)")

_SEVERITIES: Final = (
    (Severity.IGNORE, "logged and counted", "at once"),
    (
        Severity.SUSPECT,
        "the device is still allocated; several in a while make it unhealthy",
        "after a while without an error",
    ),
    (
        Severity.UNHEALTHY,
        "the device is not allocated",
        "after the quiet time without an error",
    ),
    (
        Severity.FATAL,
        "no device of the GPU is allocated",
        "as above, once a reset, a reload of the driver or a boot was seen",
    ),
)

_SCOPES: Final = {Scope.GPU: "GPU", Scope.INSTANCE: "instance"}


def xids() -> str:
    """Return the page of all errors."""
    severities = table(
        ("severity", "what it means", "when the device is well again"),
        [(code(severity.value), means, over) for severity, means, over in _SEVERITIES],
    )
    alike: dict[tuple[str, ...], list[int]] = {}
    for xid in map(about, sorted(n for numbers in NUMBERS.values() for n in numbers)):
        cells = (
            code(xid.name),
            prose(_NUMBER.sub("", xid.meaning)),
            code(xid.severity.value),
            _SCOPES[xid.scope],
            xid.whose.value if xid.ends else "",
            prose(xid.remedy.value),
        )
        alike.setdefault(cells, []).append(xid.number)
    rows = [(_ranges(numbers), *cells) for cells, numbers in alike.items()]
    head = ("XID", "name", "meaning", "severity", "of", "fault", "what to do")
    return f"{_XIDS}\n{severities}\n{_XIDS_COLUMNS}\n{table(head, rows)}"


def _ranges(numbers: list[int]) -> str:
    """Return numbers with ranges for consecutive ones: ``39-41, 70``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


# -- packages ----------------------------------------------------------------------------------


def packages() -> str:
    """Return which driver files packages open, and which capabilities they need."""
    rows = []
    for package in known_packages():
        elsewhere = "" if package.index == "PyPI" else f" ({package.index})"
        needs = ", ".join(map(code, package.needs))
        also = [f"{code(capability)} for {why}" for capability, why in package.also.items()]
        opens = [code(name) for name in package.opens]
        opens += [f"({code(name)})" for name in package.mentions]
        notes = [package.other, package.without and f"without: {package.without}"]
        rows.append(
            (
                f"{package.name} {package.version}{elsewhere}",
                "; ".join([needs, *also]),
                ", ".join(opens),
                prose("; ".join(filter(None, notes))),
                _seen(package),
            )
        )
    return table(("package", "needs", "opens, in order", "notes", "seen"), rows)


def _seen(package: Package) -> str:
    return f"{package.seen}, {', '.join(package.how)}"


# -- capabilities ------------------------------------------------------------------------------

_KINDS: Final = (Library, Program, ConfigFile, XorgModule, Socket)


def capabilities() -> str:
    """Return one row for each capability; a superset names the other one, and what it adds."""
    rows = []
    for capability, mine in FILES.items():
        if not mine:
            continue
        part = _part_of(capability)
        added = [row for row in mine if part is None or row not in FILES[part]]
        nodes = [code(node.path) for node in NODES[capability]]
        if wants_drm([capability]):
            nodes.append("`/dev/dri` nodes of its GPUs, by-path links")
        files = [text for kind in _KINDS if (text := _listed(added, kind))]
        if part is not None:
            files.insert(0, f"all of {code(part)}")
        rows.append((code(capability), "; ".join(files), ", ".join(nodes)))
    always = [
        f"firmware {_listed(ALWAYS, Firmware)}",
        "`/proc/driver/nvidia/params` with `ModifyDeviceFiles: 0`, read-only",
    ]
    gpus = (
        f"{code(CONTROL.path)}, `/dev/nvidiaN` of each GPU, `/dev/nvidia-caps/nvidia-capN` of MIG"
    )
    rows.append(("always", "; ".join(always), gpus))
    return table(("capability", "files", "nodes"), rows)


def _part_of(capability: str) -> str | None:
    """Return the capability whose rows this one contains, in addition to its own."""
    mine = set(FILES[capability])
    for other, rows in FILES.items():
        if rows and other != capability and set(rows) < mine:
            return other
    return None


def _listed(rows: tuple[Row, ...] | list[Row], kind: type[Row]) -> str:
    return ", ".join(_one(row) for row in rows if isinstance(row, kind))


def _one(row: Row) -> str:
    if isinstance(row, (Library, XorgModule)):
        name = f"{row.directory}/{row.name}" if row.directory else row.name
        links = ", ".join(code(link) for link in row.links)
        return code(name) + (f" ({links})" if links else "")
    if isinstance(row, ConfigFile):
        return code(f"{row.below}/{row.name}")
    if isinstance(row, Socket):
        return code(row.path)
    return code(f"/lib/firmware/nvidia/{{v}}/{row.name}" if isinstance(row, Firmware) else row.name)
