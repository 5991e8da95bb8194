"""A run on one machine: unpack, prepare, look, prove, measure, report.

Whatever the machine lacks, a report is written. If no container can be started at all, it says
what was tried and what came of each try.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import ExitStack
from py_compile import PycInvalidationMode
from typing import TYPE_CHECKING, Any, Final

from api.errors import NvshimError
from hooks import engine
from hooks.config import Config, load_config
from integration.containerd import Completed, PrivateContainerd
from integration.gpu import facts, programs
from integration.gpu.capabilities import check_capabilities
from integration.gpu.checks import Subject, computes, make_checks, told
from integration.gpu.containers import OURS, STOCK, TIMEOUT, Containers
from integration.gpu.errors import BundleDamaged
from integration.gpu.figures import measure
from integration.gpu.machine import Machine, prepared
from integration.gpu.report import Report, ended, failed, not_possible
from integration.parts import Parts
from shim.launcher import write_launcher

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hooks.node.inventory import Inventory

MANIFEST: Final = "manifest.json"
LOG: Final = "containerd.log"
SHIM: Final = "containerd-shim-nvidia-v1"
PROGRAMS: Final = "programs"
IMAGE: Final = "image.tar"

_LARGEST_LOG: Final = 8 << 20
_TITLE: Final = "containerd-shim-nvidia on a machine with GPUs"

# runc without cgroups: it ignores that it may not make them, if nobody names one.
_WITHOUT_CGROUPS: Final = '#!/bin/sh\nexec "{runc}" --rootless=true "$@"\n'
# What is tried until a container starts: words for a person, flags of ctr. Its usual share of the
# processor is a limit that takes a controller.
_NO_LIMITS: Final = ("--cpu-shares", "0")
_NO_PIVOT: Final = ("--no-pivot",)
_NO_CGROUP: Final = ("--cgroup", "")


def main(bundle: str, arguments: Sequence[str]) -> int:
    """Run, and write the report.

    Args:
        bundle: where the bundle is.
        arguments: the command line, without the program.

    Returns:
        The exit status: 0 if something was proved and nothing failed, 1 if not, 2 if the machine
        is not one to run on.
    """
    asked = _parser().parse_args(arguments)
    # An end by signal cleans up like any other.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(asked.out, LOG))
    report = Report(_TITLE, _say, time.monotonic() + asked.time_limit)
    try:
        with prepared(asked.work) as machine:
            _run(bundle, machine, report, asked)
    except NvshimError as error:
        print(f"run-on-gpu: {error}", file=sys.stderr)
        if not report.checks:
            return 2
        report.add(ended(error))
    except Exception as error:  # noqa: BLE001 - what was found so far is worth having
        report.add(ended(error))
    finally:
        if report.checks or report.facts:
            report.write(asked.out)
            _say(f"{report.summary}; the report is in {asked.out}")
    return 0 if report.passed else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="run-on-gpu",
        description="Proves what containerd-shim-nvidia gives to containers on this machine.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", default="gpu-report", help="directory of the report; gpu-report")
    parser.add_argument("--config", help="the shim's config.toml; else the driver is looked for")
    parser.add_argument("--driver-root", help="where the driver is, instead of looking for it")
    parser.add_argument("--work", help="where a work directory is made")
    parser.add_argument("--rounds", type=int, default=10, help="of measured starts; 10")
    parser.add_argument("--shims", type=int, default=8, help="measured for memory; 8")
    parser.add_argument(
        "--time-limit", type=float, default=400, help="seconds after which no check begins; 400"
    )
    return parser


def _run(bundle: str, machine: Machine, report: Report, asked: argparse.Namespace) -> None:
    parts = _unpacked(bundle, machine)
    report.tell("The bundle", _manifest_rows(bundle))
    report.tell("The machine", facts.of_machine(machine, parts))
    config_path = _write_config(machine, asked)
    config = load_config(config_path)
    simulated = config.proc != "/proc"
    if simulated:
        report.tell("The machine", [("GPUs", "simulated: real files and nodes, no kernel module")])
    report.tell("The kernel module", facts.of_kernel_module(config))
    found: list[Inventory] = []
    report.check("the engine finds the driver and GPUs", lambda: _inventory(config, report, found))
    if found:
        _look_outside(found[0], machine, report, simulated=simulated)
        # Those for CUDA are made when it is first used.
        found[0] = engine.load_inventory(config) or found[0]
    with ExitStack() as cleanup:
        containers = _start(machine, parts, report, cleanup, config=config_path, out=asked.out)
        if containers is None:
            return
        if found:
            subject = Subject(containers, found[0], config, simulated, machine.cgroups)
            make_checks(subject, report)
            check_capabilities(subject, report)
            measure(subject, report, rounds=asked.rounds, shims=asked.shims)
        else:
            report.check("GPUs in containers", _no_inventory)
    report.check("at the end nothing is left of containerd", lambda: "it was removed")


def _no_inventory() -> str:
    raise not_possible("the engine found no driver")


def _raise(error: Exception) -> str:
    raise error


# --- Unpacking ---------------------------------------------------------------------------


def _unpacked(bundle: str, machine: Machine) -> Parts:
    """Have the bundle's programs, image and modules in the work directory."""
    manifest = _manifest(bundle)
    path = os.path.join(bundle, manifest["payload"])
    asked = f"to unpack {path}"
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != manifest["sha256"]:
            raise BundleDamaged(asked, found="it has another digest", do="copy the bundle again")
        with tarfile.open(path) as archive:
            # A Python before 3.11.4 has no filters; the digest says that the members are ours.
            archive.extraction_filter = getattr(tarfile, "data_filter", _as_it_is)
            archive.extractall(machine.work)  # noqa: S202
    except (OSError, tarfile.TarError) as error:
        do = "use a Python with lzma" if isinstance(error, tarfile.CompressionError) else ""
        raise BundleDamaged(asked, found=str(error), do=do) from error
    directory = os.path.join(machine.work, PROGRAMS)
    programs.relocate(directory)
    # Compiled where nothing but us writes: the bundle may be on a read-only file system.
    library = os.path.join(machine.work, "lib")
    shutil.copytree(os.path.join(bundle, "lib"), library)
    compileall.compile_dir(library, quiet=2, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
    shims = os.path.join(machine.work, "bin")
    os.mkdir(shims)
    shutil.copy(os.path.join(directory, SHIM), shims)
    write_launcher(
        os.path.join(shims, f"{SHIM}.py"),
        interpreter=os.path.realpath(sys.executable),
        library_paths=[library],
        revision=manifest["revision"],
    )
    names = ("containerd", "ctr", "containerd-shim-runc-v2", "runc")
    containerd, ctr, shim, runc = (os.path.join(directory, name) for name in names)
    return Parts("of the bundle", containerd, ctr, shim, runc, crun="")


def _as_it_is(member: tarfile.TarInfo, _path: str) -> tarfile.TarInfo:
    return member


def _manifest(bundle: str) -> dict[str, Any]:
    path = os.path.join(bundle, MANIFEST)
    try:
        with open(path, "rb") as file:
            manifest: dict[str, Any] = json.load(file)
    except (OSError, ValueError) as error:
        raise BundleDamaged(f"to read {path}", found=str(error), do="copy it again") from error
    return manifest


def _manifest_rows(bundle: str) -> list[tuple[str, str]]:
    return [(name, str(value)) for name, value in _manifest(bundle).items()]


def _write_config(machine: Machine, asked: argparse.Namespace) -> str:
    if asked.config:
        named: str = asked.config
        return os.path.abspath(named)
    # Links on the host would outlive the run; systemd is not asked for cgroups here.
    lines = ["[node]", f"state = {json.dumps(machine.work + '/state')}", "char-links = false"]
    if asked.driver_root:
        lines.append(f"driver-root = {json.dumps(asked.driver_root)}")
    path = os.path.join(machine.work, "shim.toml")
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join([*lines, ""]))
    return path


# --- Outside of containers ----------------------------------------------------------------


def _inventory(config: Config, report: Report, found: list[Inventory]) -> str:
    began = time.perf_counter()
    answer = subprocess.run(
        engine.probe_command(config), capture_output=True, check=False, env={}
    ).stdout
    inventory = engine.take_inventory(config, answer)
    if not inventory.nodes.usable:
        # Nobody may have used a GPU since the machine was started; NVIDIA's programs make nodes.
        facts.of_smi(inventory)
        inventory = engine.take_inventory(config, answer)
    milliseconds = (time.perf_counter() - began) * 1000
    found.append(inventory)
    report.tell("The node, as the engine sees it", facts.of_inventory(inventory, milliseconds))
    report.values["inventory_ms"] = milliseconds
    usable = [gpu for gpu in inventory.gpus if gpu.path in inventory.nodes.usable]
    if not usable and not inventory.mig_devices:
        raise failed("no GPU with a usable node: see the tables below")
    return (
        f"driver {inventory.driver.version} in {inventory.driver.root}, "
        f"{len(usable)} of {len(inventory.gpus)} GPUs usable, "
        f"NVML {inventory.nvml_failure or 'answered'}"
    )


def _look_outside(
    inventory: Inventory, machine: Machine, report: Report, *, simulated: bool
) -> None:
    """What works without containers: a check that fails there too is not the shim's fault."""
    report.tell("nvidia-smi outside of containers", facts.of_smi(inventory))
    report.check(
        "CUDA computes outside of containers",
        lambda: _computes_outside(inventory, machine, simulated=simulated),
    )


def _computes_outside(inventory: Inventory, machine: Machine, *, simulated: bool) -> str:
    if simulated:
        raise not_possible("simulated")
    program = os.path.join(machine.work, PROGRAMS, "gpu")
    environment = {"LD_LIBRARY_PATH": ":".join(inventory.driver.library_directories)}
    done = subprocess.run(
        [program, "cuda"], capture_output=True, text=True, check=False, env=environment,
        timeout=TIMEOUT,
    )  # fmt: skip
    completed = Completed((program,), done.returncode, done.stdout, done.stderr)
    usable = [gpu.uuid for gpu in inventory.gpus if gpu.path in inventory.nodes.usable]
    subject = Subject(None, inventory, Config(), simulated=False, cgroups="")  # type: ignore[arg-type]
    return computes(subject, completed, usable)


# --- Containers ---------------------------------------------------------------------------


def _start(
    machine: Machine,
    parts: Parts,
    report: Report,
    cleanup: ExitStack,
    *,
    config: str,
    out: str,
) -> Containers | None:
    """A containerd whose containers start; None if none does."""
    for words, flags, with_cgroups in _ways(machine):
        containerd = PrivateContainerd(
            os.path.join(machine.work, "c"),
            shim_directory=os.path.join(machine.work, "bin"),
            shim_config=config,
            environment={} if machine.overlay else {"CONTAINERD_SNAPSHOTTER": "native"},
            parts=parts if with_cgroups else _without_cgroups(machine, parts),
        )
        attempt = ExitStack()
        attempt.callback(containerd.remove)
        # Before it is removed, and its log with it.
        attempt.callback(_keep_log, containerd.log_path, out)
        containers = Containers(containerd, flags)
        imported = report.check(
            f"containerd starts{words}, and takes the image",
            lambda containerd=containerd: _import(containerd, machine),  # type: ignore[misc]
        )
        # Side by side with containerd's own: what fails there too is the machine's doing.
        stock = imported and report.check(
            f"a container runs through containerd's own shim{words}",
            lambda containers=containers: _true(containers, STOCK, excused=True),  # type: ignore[misc]
        )
        ours = imported and report.check(
            f"a container runs through this shim{words}",
            lambda containers=containers, stock=stock: _true(  # type: ignore[misc]
                containers, OURS, excused=not stock
            ),
        )
        if ours:
            if not with_cgroups and not machine.cgroups:
                machine.cgroups = "with cgroups no container starts"
            cleanup.push(attempt.pop_all())
            return containers
        attempt.close()
        if not imported or stock:
            break
    report.check("a container runs in some way", _none_runs)
    return None


def _none_runs() -> str:
    raise failed("none does: see the attempts above, and the log beside this report")


def _ways(machine: Machine) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """How containers are tried to be started: words, flags, whether with cgroups."""
    if not machine.cgroups:
        yield "", (), True
        yield " without limits", _NO_LIMITS, True
        yield " without limits and pivot_root", (*_NO_LIMITS, *_NO_PIVOT), True
    without = (*_NO_LIMITS, *_NO_CGROUP)
    yield " without cgroups", without, False
    yield " without cgroups and pivot_root", (*without, *_NO_PIVOT), False


def _without_cgroups(machine: Machine, parts: Parts) -> Parts:
    directory = os.path.join(machine.work, "without-cgroups")
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(directory, "runc")
    with open(path, "w", encoding="utf-8") as file:
        file.write(_WITHOUT_CGROUPS.format(runc=parts.runc))
    os.chmod(path, 0o755)  # noqa: S103 - a program
    return Parts(parts.name, parts.containerd, parts.ctr, parts.shim, path, parts.crun)


def _import(containerd: PrivateContainerd, machine: Machine) -> str:
    containerd.start()
    containerd.ctr("images", "import", os.path.join(machine.work, IMAGE), timeout=TIMEOUT)
    major, minor = containerd.parts.version
    return f"containerd {major}.{minor}"


def _true(containers: Containers, runtime: str, *, excused: bool) -> str:
    done = containers.run("true", runtime=runtime)
    if done.code != 0:
        raise (not_possible if excused else failed)(told(done))
    return f"{containers.timed(runtime=runtime):.0f} ms the second time"


def _keep_log(path: str, out: str) -> None:
    """Keep the end of containerd's log, in which its shims write too, beside the report."""
    os.makedirs(out, exist_ok=True)
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - _LARGEST_LOG))
            content = file.read()
    except FileNotFoundError:
        return
    with open(os.path.join(out, LOG), "ab") as kept:
        kept.write(content)


def _say(line: str) -> None:
    print(line, flush=True)


__all__ = ["IMAGE", "LOG", "MANIFEST", "PROGRAMS", "SHIM", "main"]
