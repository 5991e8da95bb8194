"""``python -m tests.soak``: a day's work in minutes, and nothing may stay of it.

Workers do what a node does all day, at random and at once, on a containerd of their own: short
containers and long ones, pods, execs, terminals, signals, pauses, clients that are cut off. Between
shifts containerd is killed and started again under everything that runs. What each of them does is
checked (output, exit code); after each shift so is what the long-lived shims have grown to, and at
the end that nothing is left on the machine.

The same seed deals each worker the same work; how it interleaves is the machine's.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from tests.harness.launcher import make_launcher
from tests.harness.leaks import Census
from tests.harness.runtime import OURS, Container, Runtime, new_name, remove_fifos
from tools.containerd import PrivateContainerd
from tools.images import busybox, write_archive

GROUP: Final = "io.containerd.runc.v2.group"
_SHIFT: Final = 20.0  # seconds
_REST: Final = 3  # seconds after a shift, until all that it began has ended
_TIMEOUT: Final = 120.0  # seconds, for one piece of work on a machine that has much to do
# What a long-lived shim may grow by after its first shift, in KiB: the allocator's slack.
_GROWTH: Final = 1024


class Wrong(Exception):
    """Something was not as it has to be; ``str()`` of it says what."""


def expect(what: str, seen: object, wanted: object) -> None:
    """Raise :class:`Wrong` unless both are equal."""
    if seen != wanted:
        raise Wrong(f"{what}: {seen!r}, not {wanted!r}")


# -- the work -------------------------------------------------------------------------------


def run_short(runtime: Runtime, _: Container, dice: random.Random) -> None:
    """A container that says something and ends."""
    code = dice.randrange(100)
    done = runtime.run("sh", "-c", f"echo out; echo err >&2; exit {code}", timeout=_TIMEOUT)
    expect("a container's code, output", (done.code, done.stdout), (code, "out\n"))
    expect("a container's errors", done.stderr, "err\n")


def run_much_output(runtime: Runtime, _: Container, dice: random.Random) -> None:
    """A container that writes a lot right before its end."""
    size = dice.randrange(1, 1 << 21)
    script = f"head -c {size} /dev/zero | tr '\\0' x"
    done = runtime.run("sh", "-c", script, timeout=_TIMEOUT)
    expect("bytes of output", len(done.stdout), size)


def run_detached(runtime: Runtime, _: Container, dice: random.Random) -> None:
    """A container that is started, looked at, killed and deleted by different clients."""
    container = Container(runtime, new_name())
    words = runtime.words("sleep", "1000", name=container.name, flags=("--detach", "--null-io"))
    runtime.containerd.ctr(*words, timeout=_TIMEOUT)
    if dice.random() < 0.3:
        runtime.containerd.ctr("tasks", "pause", container.name, timeout=_TIMEOUT)
        expect("a paused container", container.status, "PAUSED")
        runtime.containerd.ctr("tasks", "resume", container.name, timeout=_TIMEOUT)
    container.kill()
    expect("a killed container's code", container.exit_code(timeout=_TIMEOUT), 137)
    runtime.containerd.ctr("containers", "rm", container.name)


def run_member(runtime: Runtime, mine: Container, dice: random.Random) -> None:
    """A further container in the pod of the worker's long-lived one."""
    code = dice.randrange(100)
    flags = ("--annotation", f"{GROUP}=pod-of-{mine.name}")
    done = runtime.run("sh", "-c", f"exit {code}", flags=flags, timeout=_TIMEOUT)
    expect("a member's code", done.code, code)


def run_missing(runtime: Runtime, _: Container, __: random.Random) -> None:
    """A container whose program is not there."""
    done = runtime.run("no-such-program", timeout=_TIMEOUT)
    expect(
        "whether it failed and said why", (done.code, "no-such-program" in done.stderr), (1, True)
    )


def execute(_: Runtime, mine: Container, dice: random.Random) -> None:
    """Execs in the worker's long-lived container."""
    for _number in range(dice.randrange(1, 10)):
        code = dice.randrange(100)
        done = mine.exec("sh", "-c", f"echo out; exit {code}", timeout=_TIMEOUT)
        expect("an exec's code and output", (done.code, done.stdout), (code, "out\n"))


def execute_through(_: Runtime, mine: Container, dice: random.Random) -> None:
    """Bytes through an exec and back."""
    text = "y" * dice.randrange(1, 1 << 20)
    done = mine.exec("cat", stdin=text, timeout=_TIMEOUT)
    expect("what came back", done.stdout == text, wanted=True)


def execute_cut_off(_: Runtime, mine: Container, dice: random.Random) -> None:
    """An exec whose client is killed."""
    exec_id = new_name("e")
    # It ends by itself, should it be started only after the signal.
    words = mine.exec_words("sleep", str(_REST), exec_id=exec_id)
    client = mine.runtime.containerd.spawn_ctr(
        *words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    time.sleep(dice.uniform(0.0, 0.5))
    client.kill()
    client.wait()
    mine.kill(flags=("--exec-id", exec_id))


def list_processes(_: Runtime, mine: Container, __: random.Random) -> None:
    """What is asked all the time by those who look."""
    expect("whether init is among the pids", mine.pid in mine.pids, wanted=True)


WORK: Final[tuple[tuple[Callable[[Runtime, Container, random.Random], None], int], ...]] = (
    (run_short, 6),
    (run_much_output, 2),
    (run_detached, 4),
    (run_member, 4),
    (run_missing, 1),
    (execute, 6),
    (execute_through, 3),
    (execute_cut_off, 1),
    (list_processes, 3),
)


# -- who does it ----------------------------------------------------------------------------


@dataclass
class Worker:
    """One that works by itself, with a long-lived container of its own."""

    runtime: Runtime
    dice: random.Random
    container: Container  # that container
    shim: int = 0  # the pid of its shim
    done: int = 0  # how many pieces of work it has done
    failures: list[str] = field(default_factory=list)  # what was wrong
    # memory (KiB) and descriptors of the shim, after each shift
    sizes: list[tuple[int, int]] = field(default_factory=list)

    def work(self, until: float) -> None:
        """Do pieces of work until a time, or until something is wrong."""
        kinds = [kind for kind, weight in WORK for _ in range(weight)]
        while time.monotonic() < until and not self.failures:
            kind = self.dice.choice(kinds)
            try:
                kind(self.runtime, self.container, self.dice)
            except Exception as error:  # noqa: BLE001 - told at the end of the shift, with the rest
                self.failures.append(f"{kind.__name__}: {type(error).__name__}: {error}")
            self.done += 1

    def look(self) -> None:
        """See what its shim has become."""
        if self.container.status != "RUNNING":
            self.failures.append(f"{self.container.name} is {self.container.status!r}")
            return
        self.sizes.append((_private(self.shim), len(os.listdir(f"/proc/{self.shim}/fd"))))

    def judge(self) -> None:
        """Compare the last look with the first."""
        if len(self.sizes) < 2:
            return
        (memory, descriptors), (memory_now, descriptors_now) = self.sizes[0], self.sizes[-1]
        if memory_now > memory + _GROWTH:
            self.failures.append(f"its shim grew from {memory} to {memory_now} KiB")
        if descriptors_now > descriptors:
            self.failures.append(f"its shim had {descriptors} descriptors, now {descriptors_now}")


def main() -> int:
    """Work, and say what came of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=4, help="how long to work; 4")
    parser.add_argument("--workers", type=int, default=4, help="at once; 4")
    parser.add_argument("--seed", type=int, default=1, help="of the work; 1")
    asked = parser.parse_args()
    if os.geteuid() != 0:
        _say("soak: must be root")
        return 1
    with ExitStack() as cleanup:
        directory = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="nvshim-soak-"))
        make_launcher(f"{directory}/bin")
        containerd = cleanup.enter_context(
            PrivateContainerd(shim_directory=f"{directory}/bin", debug=False)
        )
        archive = write_archive(f"{directory}/images.tar", [busybox()])
        containerd.ctr("images", "import", archive)
        failures = _soak(containerd, asked.minutes * 60, asked.workers, asked.seed)
    for failure in failures:
        _say(f"soak: {failure}")
    _say("soak: nothing is wrong" if not failures else f"soak: {len(failures)} failures")
    return 1 if failures else 0


def _soak(containerd: PrivateContainerd, seconds: float, count: int, seed: int) -> list[str]:
    runtime = Runtime(containerd, OURS)
    census = Census(containerd)
    end = time.monotonic() + seconds
    workers = [_hire(runtime, f"{seed}-{number}") for number in range(count)]
    shift = 0
    try:
        while time.monotonic() < end and not any(worker.failures for worker in workers):
            shift += 1
            until = min(end, time.monotonic() + _SHIFT)
            threads = [threading.Thread(target=worker.work, args=(until,)) for worker in workers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            time.sleep(_REST + 1)
            containerd.kill()
            containerd.start()
            for worker in workers:
                worker.look()
            memory = statistics.median(worker.sizes[-1][0] for worker in workers if worker.sizes)
            done = sum(worker.done for worker in workers)
            _say(f"shift {shift}: {done} pieces of work, {memory:.0f} KiB private in a shim")
        for worker in workers:
            worker.judge()
    finally:
        runtime.close()
        remove_fifos(containerd)
    left = [f"left behind: {trace}" for trace in census.leftovers(timeout=20)]
    return [*(failure for worker in workers for failure in worker.failures), *left]


def _hire(runtime: Runtime, seed: str) -> Worker:
    before = set(runtime.containerd.shim_pids())
    container = runtime.expect()
    flags = ("--null-io", "--annotation", f"{GROUP}=pod-of-{container.name}")
    runtime.containerd.ctr(
        *runtime.words("sleep", "100000", name=container.name, flags=("--detach", *flags))
    )
    (shim,) = set(runtime.containerd.shim_pids()) - before
    return Worker(runtime, random.Random(seed), container, shim)


def _private(pid: int) -> int:
    """KiB of memory that a process shares with no other."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        rows = [line.split() for line in file]
    return sum(int(row[1]) for row in rows if row[0].startswith("Private_"))


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
