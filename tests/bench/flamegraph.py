"""``python -m tests.bench.flamegraph DIRECTORY``: draw where the shim spends its time.

lifecycles.svg
    A running shim that gets container after container, each with two simulated GPUs, all in one
    pod. It is sampled from outside; only processor time counts, and runc's time does not.
cold-start.svg
    The imports of a cold start: those of the verb, and those of the server after its answer.

py-spy samples and draws. It reads the memory of the unmodified shim.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
from typing import Final

from tests.bench.imports import by_package
from tests.bench.report import table
from tests.bench.runs import once
from tests.bench.stage import GPUS, Sizes, Stage, say
from tests.harness.launcher import INTERPRETER, REPOSITORY, SITE
from tests.harness.runtime import OURS, Runtime, new_name
from tests.harness.waiting import eventually
from tools.images import GLIBC

_RATE: Final = 1000
_MARK: Final = "\nnow the server\n"
_PATIENCE: Final = 20.0
# Not with the annotation of Kubernetes, whose pods get no GPU by a variable.
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
        path = os.path.join(asked.directory, "lifecycles.svg")
        _lifecycles(stage, sampler, asked.lives, path)
        _name(path, f"the shim during {asked.lives} lives of a container with two GPUs")
    path = os.path.join(asked.directory, "cold-start.svg")
    _cold_start(sampler, path)
    _name(path, "the imports of a cold start")
    sys.stdout.write(_tables())
    return 0


def _lifecycles(stage: Stage, sampler: str, lives: int, path: str) -> None:
    """Sample one shim, and draw."""
    runtime = Runtime(stage.warm, OURS)
    pod = ("--annotation", f"{_POD}={new_name('pod')}")
    try:
        runtime.start_idle(image=GLIBC, flags=("--null-io", *pod))
        (shim,) = stage.warm.shim_pids()
        run = once(runtime, GLIBC, (*pod, *GPUS))
        run()
        say(f"sampling a shim during {lives} lives")
        argv = [
            sampler, "record", "--pid", str(shim), "--rate", str(_RATE), "--function",
            "--output", path, "--duration", "600", "--nonblocking",
        ]  # fmt: skip
        said = os.path.join(stage.directory, "py-spy")
        with (
            open(said, "wb") as file,
            subprocess.Popen(argv, stdout=file, stderr=file) as recorder,
        ):
            try:
                # py-spy prints this when it is attached.
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


def _name(path: str, title: str) -> None:
    """Replace a picture's title; py-spy writes its command line, with this machine's paths."""
    picture = _text(path).replace(f"{REPOSITORY}/", "").replace(f"{SITE}/", "")
    with open(path, "w", encoding="utf-8") as file:
        file.write(re.sub(r"[^>]*py-spy record[^<]*", title, picture))


# The imports of a cold start: for ``start``, and for the server that it leaves running.
_VERB: Final = "import shim.verbs.verbs, shim.verbs.start"
_SERVER: Final = "import shim.pod.server"


def _program(*statements: str) -> list[str]:
    text = "\n".join([f"import sys; sys.path += {[REPOSITORY, SITE]!r}", *statements])
    return [INTERPRETER, "-IS", "-c", text]


def _cold_start(sampler: str, path: str) -> None:
    """Sample the imports of a cold start, and draw."""
    say("importing what a cold start imports")
    program = _program(_VERB, _SERVER)
    for _ in range(2):  # the first start may have to compile them
        subprocess.run(program, check=True)
    argv = [sampler, "record", "--rate", str(_RATE), "--function", "--output", path, "--", *program]
    subprocess.run(argv, capture_output=True, check=True)


def _text(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _tables() -> str:
    """Return the cost of each package's imports in a cold start."""
    argv = _program(_VERB, f"sys.stderr.write({_MARK!r})", _SERVER)
    argv[1:1] = ["-X", "importtime"]
    verb, _, server = subprocess.run(
        argv, capture_output=True, text=True, check=True
    ).stderr.partition(_MARK)
    parts = []
    for text, name in ((verb, "the verb, until its answer"), (server, "the server, after it")):
        found = by_package(text)
        lines = [(package, str(count), f"{own:.1f}") for package, (count, own) in found.items()]
        told = [line for line in lines if float(line[2]) >= 0.3]
        rest = sum(own for _, own in found.values()) - sum(float(line[2]) for line in told)
        told.append(("others", str(len(lines) - len(told)), f"{rest:.1f}"))
        parts.append(table((name, "modules", "ms"), told))
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
