"""A run on one machine: prepare, check, measure, report.

It writes a report whatever the machine lacks. If no container can be started at all, the report
lists each attempt and its result.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Final

from api.errors import NvshimError
from hooks import engine
from hooks.config import Config, load_config
from hooks.node.inventory import Inventory
from integration.simulated.programs import Programs
from integration.tree import Tree, verify
from tools.containerd import Completed, PrivateContainerd
from tools.gpu.capabilities import check_capabilities
from tools.gpu.checks import Subject, computes, make_checks, told
from tools.gpu.containers import OURS, STOCK, TIMEOUT, Containers
from tools.gpu.figures import measure
from tools.gpu.machine import BUNDLE, WORK, Machine, prepared
from tools.gpu.report import Report, ended, failed, not_possible

_TITLE: Final = "containerd-shim-nvidia on a machine with GPUs"
_SMI_TIMEOUT: Final = 60.0
_LARGEST_LOG: Final = 8 << 20

_PROGRAMS: Final = Programs(
    name="of the bundle",
    containerd=f"{BUNDLE}/programs/containerd",
    ctr=f"{BUNDLE}/programs/ctr",
    shim=f"{BUNDLE}/programs/containerd-shim-runc-v2",
    runc=f"{BUNDLE}/programs/runc",
    crun="",
)
# runc without cgroups: it ignores that it may not create them, unless the spec names one.
_WITHOUT_CGROUPS: Final = '#!/bin/sh\nexec "{runc}" --rootless=true "$@"\n'
# The attempts to start a container: a description, and flags of ctr. Its default share of the
# processor is a limit that needs a controller.
_NO_LIMITS: Final = ("--cpu-shares", "0")
_NO_PIVOT: Final = ("--no-pivot",)
_NO_CGROUP: Final = ("--cgroup", "")


def main(bundle: str, arguments: Sequence[str]) -> int:
    """Run, and write the report.

    Args:
        arguments: the command line, without the program.

    Returns:
        The exit status: 0 if a check passed and none failed, 1 if not, 2 if the machine is not
        usable, or the bundle is not complete.
    """
    asked = _parser().parse_args(arguments)
    # Clean up after a signal, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    report = Report(_TITLE, _say, time.monotonic() + asked.time_limit)
    try:
        tree = verify(bundle)
        os.makedirs(asked.out, exist_ok=True)
        with prepared(bundle) as machine:
            _run(tree, machine, report, asked)
    except NvshimError as error:
        print(f"run-on-gpu: {error}", file=sys.stderr)
        if not report.checks:
            return 2
        report.add(ended(error))
    except Exception as error:  # noqa: BLE001 - keep the results so far
        report.add(ended(error))
    finally:
        if report.checks:
            report.write(asked.out)
            _say(f"{report.summary}; the report is in {asked.out}")
    return 0 if report.passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="run-on-gpu",
        description="Test containerd-shim-nvidia with containers on this machine.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out", default="gpu-report", type=os.path.abspath, help="the report's directory"
    )
    parser.add_argument("--config", help="the shim's config.toml (default: search for the driver)")
    parser.add_argument("--driver-root", help="the driver's directory, instead of a search")
    parser.add_argument(
        "--rounds", type=int, default=10, help="rounds of measured starts (default: 10)"
    )
    parser.add_argument(
        "--shims", type=int, default=8, help="shims to measure for memory (default: 8)"
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=400,
        help="seconds after which no check starts (default: 400)",
    )
    return parser


def _run(tree: Tree, machine: Machine, report: Report, asked: argparse.Namespace) -> None:
    config_path = os.path.abspath(asked.config) if asked.config else _write_config(asked)
    config = load_config(config_path)
    simulated = config.proc != "/proc"
    report.tell("The bundle", [("version", tree.version), ("revision", tree.revision)])
    report.tell("The machine", [("found and done", note) for note in machine.notes])
    if machine.cgroups:
        report.tell("The machine", [("cgroups not usable", machine.cgroups)])
    if simulated:
        report.tell("The machine", [("GPUs", "simulated: real files and nodes, no kernel module")])
    found: list[Inventory] = []
    report.check("the engine finds the driver and GPUs", lambda: _inventory(config, report, found))
    _ask_nvshim(report, config_path, asked.out)
    if found:
        report.check(
            "CUDA computes outside of containers",
            lambda: _computes_outside(found[0], simulated=simulated),
        )
        # CUDA creates its nodes when it is first used.
        found[0] = engine.load_inventory(config) or found[0]
    with ExitStack() as cleanup:
        containers = _start(machine, report, cleanup, config=config_path, out=asked.out)
        if containers is None:
            return
        if found:
            subject = Subject(containers, found[0], config, simulated, machine.cgroups)
            make_checks(subject, report)
            check_capabilities(subject, report)
            measure(subject, report, rounds=asked.rounds, shims=asked.shims)
        else:
            report.check("GPUs in containers", _no_inventory)
    report.check("containerd leaves nothing at the end", lambda: "it was removed")


def _write_config(asked: argparse.Namespace) -> str:
    # Links on the host would outlive the run, and runc must not use systemd for cgroups.
    lines = ["[node]", f'state = "{WORK}/state"', "char-links = false"]
    if asked.driver_root:
        lines.append(f"driver-root = {json.dumps(asked.driver_root)}")
    path = f"{WORK}/shim.toml"
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join([*lines, ""]))
    return path


def _no_inventory() -> str:
    raise not_possible("the engine found no driver")


# --- Outside of containers ----------------------------------------------------------------


def _inventory(config: Config, report: Report, found: list[Inventory]) -> str:
    began = time.perf_counter()
    answer = subprocess.run(
        engine.probe_command(config), capture_output=True, check=False, env={}
    ).stdout
    inventory = engine.take_inventory(config, answer)
    # Device nodes may not exist before the first use of a GPU; NVIDIA's programs create them.
    report.tell("nvidia-smi outside of containers", _smi(inventory))
    if not inventory.nodes.usable:
        inventory = engine.take_inventory(config, answer)
    report.values["inventory_ms"] = (time.perf_counter() - began) * 1000
    found.append(inventory)
    usable = [gpu for gpu in inventory.gpus if gpu.path in inventory.nodes.usable]
    if not usable and not inventory.mig_devices:
        raise failed("no GPU with a usable node: see the facts next to this report")
    return (
        f"driver {inventory.driver.version} in {inventory.driver.root}, "
        f"{len(usable)} of {len(inventory.gpus)} GPUs usable, "
        f"NVML {inventory.nvml_failure or 'answered'}"
    )


def _smi(inventory: Inventory) -> list[tuple[str, str]]:
    program = next((f.source for f in inventory.driver.files if f.row == "nvidia-smi"), None)
    if program is None:
        return [("nvidia-smi", "the driver has none")]
    try:
        done = _outside(inventory, program, "-L", timeout=_SMI_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [(f"{program} -L", str(error))]
    return [(f"{program} -L", line) for line in told(done).splitlines()]


def _outside(inventory: Inventory, *argv: str, timeout: float = TIMEOUT) -> Completed:
    """Run a program on the machine, whose own loader may not find the driver."""
    environment = {"LD_LIBRARY_PATH": ":".join(inventory.driver.library_directories)}
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, env=environment, timeout=timeout
    )
    return Completed(argv, done.returncode, done.stdout, done.stderr)


def _computes_outside(inventory: Inventory, *, simulated: bool) -> str:
    """Check CUDA outside of containers: if this fails too, the shim is not the cause."""
    if simulated:
        raise not_possible("simulated")
    done = _outside(inventory, f"{BUNDLE}/programs/gpu", "cuda")
    usable = [gpu.uuid for gpu in inventory.gpus if gpu.path in inventory.nodes.usable]
    return computes(done, usable, simulated=False, with_mig=bool(inventory.mig_devices))


def _ask_nvshim(report: Report, config: str, out: str) -> None:
    """Save nvshim's view of the machine, for readers who have no access to it."""
    nvshim = f"{BUNDLE}/bin/nvshim"
    for name, words in (
        ("info", ["info"]),
        ("doctor", ["doctor", "--bundle", os.path.join(out, "doctor.tar.gz")]),
    ):
        done = subprocess.run(
            [nvshim, *words, "--config", config, "-o", "json"],
            capture_output=True, text=True, check=False, env={"LANG": "C.UTF-8"},
        )  # fmt: skip
        try:
            report.values[name] = json.loads(done.stdout)
        except ValueError:
            report.values[name] = done.stderr
    findings = report.values["doctor"]
    if isinstance(findings, dict):
        rows = [
            (f"{each['severity']} {each['code']}", each["found"]) for each in findings["findings"]
        ]
        report.tell("What nvshim doctor finds", rows)


# --- Containers ---------------------------------------------------------------------------


def _start(
    machine: Machine, report: Report, cleanup: ExitStack, *, config: str, out: str
) -> Containers | None:
    """Return a containerd whose containers start; None if none does."""
    for words, flags, with_cgroups in _ways(machine):
        containerd = PrivateContainerd(
            tempfile.mkdtemp(prefix="c-", dir=WORK),
            shim_directory=f"{BUNDLE}/bin",
            shim_config=config,
            environment={} if machine.overlay else {"CONTAINERD_SNAPSHOTTER": "native"},
            parts=_PROGRAMS if with_cgroups else _without_cgroups(),
        )
        report.tell("The machine", [("containerd", containerd.directory)])
        attempt = ExitStack()
        attempt.callback(containerd.remove)
        # Save the log before it is removed with containerd.
        attempt.callback(_keep_log, containerd.log_path, out)
        containers = Containers(containerd, flags)
        imported, stock, ours = _try(containers, words, report)
        if ours:
            if not with_cgroups and not machine.cgroups:
                machine.cgroups = "with cgroups no container starts"
            cleanup.push(attempt.pop_all())
            return containers
        attempt.close()
        if not imported or stock:
            break
    report.check("a container runs in at least one way", _none_runs)
    return None


def _try(containers: Containers, words: str, report: Report) -> tuple[bool, bool, bool]:
    """Return whether containerd starts, and containers of containerd's own shim and of ours."""
    imported = report.check(
        f"containerd starts{words}, and imports the image", lambda: _import(containers)
    )
    # Try containerd's own shim as well: if it fails too, the machine is the cause.
    stock = imported and report.check(
        f"a container runs through containerd's own shim{words}",
        lambda: _true(containers, STOCK, excused=True),
    )
    ours = imported and report.check(
        f"a container runs through this shim{words}",
        lambda: _true(containers, OURS, excused=not stock),
    )
    return imported, stock, ours


def _none_runs() -> str:
    raise failed("no attempt succeeded: see the checks above, and the log next to this report")


def _ways(machine: Machine) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """Yield the attempts to start containers: description, flags, whether with cgroups."""
    if not machine.cgroups:
        yield "", (), True
        yield " without limits", _NO_LIMITS, True
        yield " without limits and pivot_root", (*_NO_LIMITS, *_NO_PIVOT), True
    without = (*_NO_LIMITS, *_NO_CGROUP)
    yield " without cgroups", without, False
    yield " without cgroups and pivot_root", (*without, *_NO_PIVOT), False


def _without_cgroups() -> Programs:
    path = f"{WORK}/without-cgroups/runc"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(_WITHOUT_CGROUPS.format(runc=_PROGRAMS.runc))
    os.chmod(path, 0o755)
    return replace(_PROGRAMS, runc=path)


def _import(containers: Containers) -> str:
    containerd = containers.containerd
    containerd.start()
    containerd.ctr("images", "import", f"{BUNDLE}/image.tar", timeout=TIMEOUT)
    major, minor = containerd.parts.version
    return f"containerd {major}.{minor}"


def _true(containers: Containers, runtime: str, *, excused: bool) -> str:
    done = containers.run("true", runtime=runtime)
    if done.code != 0:
        raise (not_possible if excused else failed)(told(done))
    return f"{containers.timed(runtime=runtime):.0f} ms the second time"


def _keep_log(path: str, out: str) -> None:
    """Save the end of containerd's log, which includes the shims' logs, next to the report."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - _LARGEST_LOG))
        with open(os.path.join(out, "containerd.log"), "ab") as kept:
            kept.write(file.read())


def _say(line: str) -> None:
    print(line, flush=True)
