"""``python -m tests.bench``: this shim beside containerd's own, on this machine, now.

Printed is a table; with all values it is also written to a JSON file. The GPU container runs on
a simulated node: its driver's files are real, so what is found, mounted and written is too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from integration.containerd import PrivateContainerd
from integration.images import BUSYBOX, GLIBC, busybox, glibc, write_archive
from integration.simulated import Scenario, SimulatedNode
from tests.bench.first_rpc import measure_start
from tests.bench.footprint import Footprint, measure_footprint
from tests.bench.injection import measure_injections, print_injections
from tests.bench.interleaving import Series, interleave
from tests.bench.work import Growth, calls, execs, many, measure_growth, output
from tests.harness.launcher import INTERPRETER, REPOSITORY, make_launcher
from tests.harness.runtime import OURS, STOCK, Runtime

if TYPE_CHECKING:
    from collections.abc import Callable

_STOCK_PROGRAM: Final = "/usr/bin/containerd-shim-runc-v2"
_GPU: Final = ("--env", "NVIDIA_VISIBLE_DEVICES=all", "--env", "NVIDIA_DRIVER_CAPABILITIES=all")

_COLD: Final = {"NVSHIM_FORK_SERVER": "0"}

# name of the series → what it is, and the name of the series that it is compared with.
_RUNS: Final = {
    "stock": ("containerd-shim-runc-v2", "stock"),
    "stock again": ("  the same again (the noise)", "stock"),
    "ours": ("containerd-shim-nvidia-v1", "stock"),
    "ours, cold": ("  without a fork server", "stock"),
    "stock, glibc": ("containerd-shim-runc-v2, larger image", "stock, glibc"),
    "ours, glibc": ("containerd-shim-nvidia-v1, larger image", "stock, glibc"),
    "ours, GPUs": ("  the same with two GPUs, all capabilities", "stock, glibc"),
    "ours, GPUs, cold": ("  the same without a fork server", "stock, glibc"),
}
_PAIR: Final = {
    "stock": ("containerd-shim-runc-v2", "stock"),
    "stock again": ("  the same again (the noise)", "stock"),
    "ours": ("containerd-shim-nvidia-v1", "stock"),
}
_STARTS: Final = {
    "stock": ("containerd-shim-runc-v2", "stock"),
    "stock again": ("  the same again (the noise)", "stock"),
    "ours": ("containerd-shim-nvidia-v1", "stock"),
    "ours, cold": ("  without a fork server", "stock"),
}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=25, help="of each comparison; 25")
    parser.add_argument("--shims", type=int, default=20, help="idle at the same time; 20")
    parser.add_argument("--many", type=int, default=100, help="containers at once; 100")
    parser.add_argument("--execs", type=int, default=1000, help="to see what they leave; 1000")
    parser.add_argument("--watch", type=float, default=10, help="seconds for wake-ups; 10")
    parser.add_argument("--json", default=os.path.join(REPOSITORY, ".cache", "bench.json"))
    asked = parser.parse_args()
    if os.geteuid() != 0:
        _say("bench: must be root")
        return 1
    began = time.monotonic()
    with ExitStack() as cleanup:
        directory = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="nvshim-bench-"))
        _say("preparing a simulated node, images and a containerd")
        node = cleanup.enter_context(
            SimulatedNode.create(f"{directory}/node", Scenario.load("two"), say=_say)
        )
        launcher = make_launcher(f"{directory}/bin")
        archive = write_archive(f"{directory}/images.tar", [busybox(), glibc()])

        def containerd_with(environment: dict[str, str]) -> PrivateContainerd:
            containerd = cleanup.enter_context(
                PrivateContainerd(
                    shim_directory=f"{directory}/bin",
                    shim_config=node.config_path,
                    environment=environment,
                    debug=False,
                )
            )
            containerd.ctr("images", "import", archive)
            return containerd

        containerd, cold = containerd_with({}), containerd_with(_COLD)
        load = os.getloadavg()[0]
        runs = _measure_runs(containerd, cold, asked.rounds)
        verbs, answers = _measure_starts(containerd, launcher, asked.rounds)
        work = _measure_work(containerd, asked.rounds, asked.many)
        growths = {}
        for name, runtime in (("stock", STOCK), ("ours", OURS)):
            _say(f"{asked.execs} execs in a shim of {runtime}")
            growths[name] = _measure_growth(Runtime(containerd, runtime), asked.execs)
        footprints = {}
        for name, runtime in (("stock", STOCK), ("ours", OURS)):
            _say(f"{asked.shims} idle shims of {runtime}")
            footprints[name] = measure_footprint(
                Runtime(containerd, runtime), count=asked.shims, watch=asked.watch
            )
        injections = measure_injections(
            2 * asked.rounds, tell=_progress("injections", 2 * asked.rounds)
        )
    machine = {**_machine(), "load before": load, "load after": os.getloadavg()[0]}
    _print(_heading(machine, asked.rounds))
    _print_table("`ctr run --rm` of `true`", _RUNS, runs)
    _print_table("the verb `start`", _STARTS, verbs)
    _print_table("from `start` to the first answered call", _STARTS, answers)
    for what, (title, unit, series) in work.items():
        _print_table(f"{title} {asked.many}" if what == "many" else title, _PAIR, series, unit)
    print_injections(*injections)
    _print_growths(asked.execs, growths)
    _print_footprints(asked.shims, footprints)
    _print(f"\n{time.monotonic() - began:.0f} s in all; every value is in {asked.json}")
    _write(
        asked.json,
        {
            "machine": machine,
            "run_ms": _values(runs),
            "start_ms": _values(verbs),
            "first_rpc_ms": _values(answers),
            **{f"{what} ({unit})": _values(series) for what, (_, unit, series) in work.items()},
            "injection_ms": _values(injections[0]),
            "inventory_ms": _values(injections[1]),
            "injection_steps_ms": {name: _values(steps) for name, steps in injections[2].items()},
            "growth": {name: asdict(growth) for name, growth in growths.items()},
            "idle": {name: asdict(footprint) for name, footprint in footprints.items()},
        },
    )
    return 0


def _measure_runs(
    containerd: PrivateContainerd, without: PrivateContainerd, rounds: int
) -> dict[str, Series]:
    stock, ours, cold = (
        Runtime(containerd, STOCK),
        Runtime(containerd, OURS),
        Runtime(without, OURS),
    )

    def run(runtime: Runtime, image: str, flags: tuple[str, ...] = ()) -> Callable[[], float]:
        def once() -> float:
            begin = time.perf_counter()
            done = runtime.run("true", image=image, flags=flags)
            seconds = time.perf_counter() - begin
            if done.code != 0:
                raise RuntimeError(f"a container failed: {done.stderr}")
            return seconds * 1000

        return once

    cases = {
        "stock": run(stock, BUSYBOX),
        "stock again": run(stock, BUSYBOX),
        "ours": run(ours, BUSYBOX),
        "ours, cold": run(cold, BUSYBOX),
        "stock, glibc": run(stock, GLIBC),
        "ours, glibc": run(ours, GLIBC),
        "ours, GPUs": run(ours, GLIBC, _GPU),
        "ours, GPUs, cold": run(cold, GLIBC, _GPU),
    }
    return interleave(cases, rounds=rounds, tell=_progress("ctr run", rounds))


def _measure_starts(
    containerd: PrivateContainerd, launcher: str, rounds: int
) -> tuple[dict[str, Series], dict[str, Series]]:
    spec = Runtime(containerd, STOCK).spec("true")
    verbs: dict[str, list[float]] = {}

    def start(name: str, program: str, environment: dict[str, str]) -> Callable[[], float]:
        def once() -> float:
            measured = measure_start(containerd, program, spec, environment)
            verbs.setdefault(name, []).append(measured.verb * 1000)
            return measured.answered * 1000

        return once

    cases = {
        "stock": start("stock", _STOCK_PROGRAM, {}),
        "stock again": start("stock again", _STOCK_PROGRAM, {}),
        "ours": start("ours", launcher, {}),
        "ours, cold": start("ours, cold", launcher, _COLD),
    }
    answers = interleave(cases, rounds=rounds, tell=_progress("start", rounds))
    return {name: Series(tuple(all_[-rounds:])) for name, all_ in verbs.items()}, answers


def _measure_work(
    containerd: PrivateContainerd, rounds: int, count: int
) -> dict[str, tuple[str, str, dict[str, Series]]]:
    """What a running container is asked for: by its key, a title, a unit and the series."""
    stock, ours = Runtime(containerd, STOCK), Runtime(containerd, OURS)
    idle = {runtime: runtime.start_idle(flags=("--null-io",)) for runtime in (stock, ours)}

    def both(
        what: str, rounds: int, measure: Callable[[Runtime], Callable[[], float]]
    ) -> dict[str, Series]:
        cases = {"stock": stock, "stock again": stock, "ours": ours}
        return interleave(
            {name: measure(runtime) for name, runtime in cases.items()},
            rounds=rounds,
            warm_up=1,
            tell=_progress(what, rounds),
        )

    few = max(2, rounds // 5)
    try:
        return {
            "exec": (
                "`ctr tasks exec` of `true`",
                "ms",
                both("exec", rounds, lambda runtime: execs(idle[runtime])),
            ),
            "output": ("a gigabyte to stdout", "MB/s", both("output", few, output)),
            "state": (
                "State",
                "/s",
                both("State", few, lambda runtime: calls(idle[runtime], "State")),
            ),
            "connect": (
                "Connect",
                "/s",
                both("Connect", few, lambda runtime: calls(idle[runtime], "Connect")),
            ),
            "many": (
                "`ctr run --rm` at once:",
                "s",
                both("many at once", few, lambda runtime: many(runtime, count)),
            ),
        }
    finally:
        for runtime in idle:
            runtime.close()


def _measure_growth(runtime: Runtime, count: int) -> Growth:
    try:
        container = runtime.start_idle(flags=("--null-io",))
        return measure_growth(container, warm_up=50, count=count)
    finally:
        runtime.close()


def _print_table(
    title: str, rows: dict[str, tuple[str, str]], measured: dict[str, Series], unit: str = "ms"
) -> None:
    _print(
        f"\n{f'{title} ({unit})':<46}{'median':>9}{'min':>9}{'max':>9}   ratio (half of the rounds)"
    )
    for name, (what, base) in rows.items():
        series = measured[name]
        line = f"  {what:<44}{series.median:>9.1f}{series.least:>9.1f}{series.most:>9.1f}"
        if base != name:
            ratios = series.over(measured[base])
            low, high = ratios.quartiles()
            line += f"   {ratios.median:.2f} ({low:.2f}-{high:.2f})"
        _print(line)


def _print_growths(count: int, growths: dict[str, Growth]) -> None:
    stock, ours = growths["stock"], growths["ours"]
    _print(f"\n{f'a shim after {count} execs, ÷ before':<46}{'runc-v2':>9}{'nvidia-v1':>12}")
    for what, a, b in (
        ("resident memory", stock.resident, ours.resident),
        ("open descriptors", stock.descriptors, ours.descriptors),
    ):
        _print(f"  {what:<44}{a[1] / a[0]:>9.3f}{b[1] / b[0]:>12.3f}")


def _print_footprints(count: int, footprints: dict[str, Footprint]) -> None:
    stock, ours = footprints["stock"], footprints["ours"]
    _print(f"\n{'an idle shim':<46}{'runc-v2':>9}{'nvidia-v1':>12}   ratio")
    for what, a, b in (
        ("PSS, alone", stock.pss_of_one, ours.pss_of_one),
        ("USS, alone", stock.uss_of_one, ours.uss_of_one),
        (f"PSS, one of {count}", stock.pss_of_many, ours.pss_of_many),
        (f"USS, one of {count}", stock.uss_of_many, ours.uss_of_many),
    ):
        _print(f"  {what:<44}{a / 1024:>6.1f} MB{b / 1024:>9.1f} MB   {b / a:.2f}")
    _print(f"  {'context switches in a minute':<44}{stock.wakeups:>6.0f}{ours.wakeups:>12.0f}")
    _print(
        f"  {'processor time in a minute':<44}{stock.processor:>6.0f} ms{ours.processor:>9.0f} ms"
    )


def _heading(machine: dict[str, Any], rounds: int) -> str:
    facts = ", ".join(f"{key} {value}" for key, value in machine.items() if "load" not in key)
    before, after = machine["load before"], machine["load after"]
    return (
        f"\n{facts}\n{rounds} rounds; load {before:.1f} before, {after:.1f} after. "
        "Ratios are medians of ratios within a round; what is closer to 1\n"
        "than the noise says nothing."
    )


def _machine() -> dict[str, Any]:
    return {
        "processors": os.cpu_count(),
        "kernel": platform.release(),
        "containerd": _version("containerd", "--version"),
        "runc": _version("runc", "--version"),
        "Python": _version(INTERPRETER, "--version"),
    }


def _version(*argv: str) -> str:
    """The last but one or last word of the first line that looks like a version."""
    text = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    words = text.splitlines()[0].split()
    return next((word for word in words if word[:1].isdigit()), words[-1])


def _values(measured: dict[str, Series]) -> dict[str, tuple[float, ...]]:
    return {name: series.values for name, series in measured.items()}


def _write(path: str, content: dict[str, Any]) -> None:
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")


def _progress(what: str, rounds: int) -> Callable[[int], None]:
    def tell(done: int) -> None:
        if sys.stderr.isatty() and done > 0:
            end = "\n" if done == rounds else ""
            sys.stderr.write(f"\r{what}: round {done} of {rounds}{end}")

    _say(f"{what}, {rounds} rounds")
    return tell


def _say(line: str) -> None:
    """Tell a person what goes on; the results alone go to stdout."""
    sys.stderr.write(f"{line}\n")


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
