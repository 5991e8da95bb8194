"""``python -m tests.bench.executed_code``: record which code shims execute.

It runs containers without and with GPUs, execs, and pods of several containers, with a copy of the
installed tree whose program notes each function that is called after the fork. It writes
executed_code.txt next to :mod:`shim.forkserver.executed_code`, which says what it is for.
"""

from __future__ import annotations

import glob
import os
import sys
from collections import Counter
from functools import cached_property
from typing import Final

from shim.forkserver.executed_code import LIST
from shim.verbs.invocation import FORK_SERVER
from tests.bench.pods import measure_pods
from tests.bench.runs import measure_runs
from tests.bench.stage import Sizes, Stage
from tests.bench.work import measure_execs, measure_exits
from tests.harness.dist import built, copied

# Put before the program of the tree. The kind of a process is the first of these that it calls.
_PROGRAM: Final = """\
import os
import sys

_KINDS = (("worker", ("shim.work.worker", "_run")), ("shim", ("shim.pod.main", "main")))
_seen, _forks, _fork, _exit = {{}}, 0, os.fork, os._exit


def _note(frame, event, _):
    if event == "call":
        _seen.setdefault((frame.f_globals.get("__name__"), frame.f_code.co_qualname))


def fork():
    global _forks
    pid = _fork()
    if pid == 0:
        _seen.clear()
        _forks += 1
    return pid


def exit_(status):
    sys.setprofile(None)
    if _forks and "{server}" in sys.argv:
        kind = next((kind for kind, function in _KINDS if function in _seen), "verb")
        with open(f"{directory}/{{kind}}.{{os.getpid()}}", "w") as file:
            file.writelines(f"{{module}} {{name}}\\n" for module, name in _seen)
    _exit(status)


os.fork, os._exit = fork, exit_
sys.setprofile(_note)
"""

# The functions of each process are together: a verb's, a verb's and a shim's, and so on.
_PLACES: Final = (
    {"verb"}, {"verb", "shim"}, {"verb", "shim", "worker"}, {"verb", "worker"},
    {"shim"}, {"shim", "worker"}, {"worker"},
)  # fmt: skip
_KINDS: Final = ("verb", "shim", "worker")
_SIZES: Final = Sizes(rounds=2, shims=1, many=(), execs=2, pods=4, watch=1)


class RecordingStage(Stage):
    """A stage whose shims record the functions that they call."""

    @property
    def records(self) -> str:
        """The directory of the records: a file for each process, named by its kind and pid."""
        return f"{self.directory}/records"

    @cached_property
    def launcher(self) -> str:
        """Return the path of the recording shim."""
        os.makedirs(self.records)
        program = f"{copied(built(), f'{self.directory}/tree').path}/bin/containerd-shim-nvidia-v1"
        with open(f"{program}.py", encoding="utf-8") as file:
            text = file.read()
        os.unlink(f"{program}.py")  # it may be a hard link
        with open(f"{program}.py", "w", encoding="utf-8") as file:
            file.write(_PROGRAM.format(directory=self.records, server=FORK_SERVER) + text)
        return program


def main() -> int:
    """Record, and write the list."""
    with RecordingStage(_SIZES) as stage:
        for measure in (measure_runs, measure_execs, measure_exits, measure_pods):
            measure(stage)
        executed = {kind: _read(f"{stage.records}/{kind}.*") for kind in _KINDS}
    every = sum(executed.values(), Counter())
    names = sorted(every, key=lambda name: (_place(name, executed), -every[name]))
    with open(LIST, "w", encoding="utf-8") as file:
        file.write("# Made by python -m tests.bench.executed_code; see executed_code.py.\n")
        file.writelines(f"{name}\n" for name in names)
    sys.stdout.write(f"{len(names)} functions: {LIST}\n")
    return 0


def _read(pattern: str) -> Counter[str]:
    """Return in how many of these files each line is, in the order in which they come first."""
    lines: Counter[str] = Counter()
    for path in sorted(glob.glob(pattern)):
        with open(path, encoding="utf-8") as file:
            lines.update(file.read().splitlines())
    return lines


def _place(name: str, executed: dict[str, Counter[str]]) -> int:
    """Return the place of the group of a function among the others."""
    return _PLACES.index({kind for kind in _KINDS if name in executed[kind]})


if __name__ == "__main__":
    sys.exit(main())
