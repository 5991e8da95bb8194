"""``python -m tests.bench.flamegraph DIRECTORY``: pictures of where the shim's time goes.

lifecycles.svg
    A running shim that gets container after container, each with two simulated GPUs, all in one
    pod. It is sampled from outside; only time on a processor counts, and not what runc takes.
cold-start.svg
    The imports of a cold start: those of the verb, and those of the server after its answer.

The shim is the unmodified one: py-spy reads its memory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from typing import Final

from integration.images import GLIBC
from tests.bench.flames import flame_graph
from tests.bench.report import table
from tests.bench.runs import once
from tests.bench.stacks import Node, by_package, from_folded, from_importtime
from tests.bench.stage import GPUS, Sizes, Stage, say
from tests.harness.launcher import INTERPRETER, REPOSITORY, SITE
from tests.harness.runtime import OURS, Runtime, new_name
from tests.harness.waiting import eventually

_RATE: Final = 1000
_MARK: Final = "\nnow the server\n"
_PATIENCE: Final = 20.0
# Not by the annotation of Kubernetes, whose pods get no GPU for a variable.
_POD: Final = "io.containerd.runc.v2.group"
_SIZES: Final = Sizes(rounds=1, shims=1, many=(), execs=1, pods=1, watch=1)


def main() -> int:
    """Profile, and draw."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.flamegraph", description=__doc__)
    parser.add_argument("directory", metavar="DIRECTORY", help="made if missing")
    parser.add_argument("--lives", type=int, default=60, help="containers that are sampled; 60")
    asked = parser.parse_args()
    sampler = shutil.which("py-spy", path=os.path.dirname(sys.executable)) or shutil.which("py-spy")
    if os.geteuid() != 0 or sampler is None:
        say("flamegraph: must be root, and needs py-spy: make flamegraph installs it")
        return 1
    os.makedirs(asked.directory, exist_ok=True)
    with Stage(_SIZES) as stage:
        lives = _lifecycles(stage, sampler, asked.lives)
    title = f"the shim during {asked.lives} lives of a container with two GPUs"
    _write(asked.directory, "lifecycles", flame_graph(lives, title, "samples"))
    title = "the imports of a cold start"
    start = _cold_start()
    _write(asked.directory, "cold-start", flame_graph(start, title, "ms"))
    sys.stdout.write(_tables(start))
    return 0


def _lifecycles(stage: Stage, sampler: str, lives: int) -> Node:
    """Samples of one shim, below the place where it was forked."""
    runtime = Runtime(stage.warm, OURS)
    pod = ("--annotation", f"{_POD}={new_name('pod')}")
    path = os.path.join(stage.directory, "stacks")
    try:
        runtime.start_idle(image=GLIBC, flags=("--null-io", *pod))
        (shim,) = stage.warm.shim_pids()
        run = once(runtime, GLIBC, (*pod, *GPUS))
        run()
        say(f"sampling a shim during {lives} lives")
        argv = [
            sampler, "record", "--pid", str(shim), "--rate", str(_RATE), "--format", "raw",
            "--output", path, "--duration", "600", "--nonblocking",
        ]  # fmt: skip
        said = f"{path}.said"
        with (
            open(said, "wb") as file,
            subprocess.Popen(argv, stdout=file, stderr=file) as recorder,
        ):
            try:
                # It says so when it has found its way in the process.
                eventually(lambda: "Sampling" in _text(said), "py-spy samples")
                for _ in range(lives):
                    run()
            finally:
                recorder.send_signal(signal.SIGINT)
                recorder.wait(_PATIENCE)
        if recorder.returncode != 0:
            raise RuntimeError(f"py-spy ended with {recorder.returncode}: {_text(said)}")
    finally:
        runtime.close()
    tree = from_folded(_text(path).splitlines(), "the shim")
    return tree.from_fork("run (api/aio/loop.py")


def _cold_start() -> Node:
    """The imports of ``start``, and of the server that it leaves behind, as they load them."""
    say("importing what a cold start imports")
    program = (
        f"import sys; sys.path += {[REPOSITORY, SITE]!r}\n"
        "import shim.verbs, shim.start\n"
        f"sys.stderr.write({_MARK!r})\n"
        "import api; api.alone = True; import shim.server\n"
    )
    argv = [INTERPRETER, "-IS", "-X", "importtime", "-c", program]
    for _ in range(2):  # the first one may have to compile them
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
    verb, _, server = done.stderr.partition(_MARK)
    start = Node("a cold start")
    for text, name in ((verb, "the verb, until its answer"), (server, "the server, after it")):
        start.below[name] = from_importtime(text, name)
    return start


def _text(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _tables(start: Node) -> str:
    """What each package's imports cost a cold start."""
    parts = []
    for part in start.below.values():
        found = by_package(part)
        lines = [(name, str(count), f"{own:.1f}") for name, (count, own) in found.items()]
        told = [line for line in lines if float(line[2]) >= 0.3]
        rest = sum(own for _, own in found.values()) - sum(float(line[2]) for line in told)
        told.append(("others", str(len(lines) - len(told)), f"{rest:.1f}"))
        parts.append(table((part.name, "modules", "ms"), told))
    return "\n".join(parts)


def _write(directory: str, name: str, content: str) -> None:
    with open(os.path.join(directory, f"{name}.svg"), "w", encoding="utf-8") as file:
        file.write(content)


if __name__ == "__main__":
    sys.exit(main())
