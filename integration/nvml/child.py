"""The child that talks to NVML. It is executed by its path.

    python3 -I -S child.py TASK SECONDS PARENT LIBRARY MODULES [ARGUMENT]...

TASK is one of :data:`TASKS`; their modules describe the questions and answers, one JSON object per
line. The last line may be ``{"error": …}``; the exit status is then 1.

The kernel ends the child after SECONDS (SIGALRM), and when its parent, the process PARENT, exits; 0
means no such limit. A child with one question has SECONDS, since the thread that asks may end
before the child does; a long-lived child has PARENT.

LIBRARY is the driver root's libnvidia-ml, and is loaded by its path. When pynvml then requests
"libnvidia-ml.so.1", glibc uses the same library, because it has that soname. MODULES is the
directory of pynvml, since an isolated interpreter does not look there itself. Apart from these
modules, the child imports nothing of the agent.

Source: prctl(2), PR_SET_PDEATHSIG; setrlimit(2); setitimer(2).
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any

QUERY, EVENTS, SAMPLES = "query", "events", "samples"
TASKS = {
    QUERY: "integration.nvml.child_query",
    EVENTS: "integration.nvml.child_events",
    SAMPLES: "integration.nvml.child_samples",
}

_PR_SET_PDEATHSIG = 1
_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir, os.pardir))
# NVML needs some tens of MiB. If it reports a wrong count, pynvml allocates that much.
_MOST_MEMORY = 4 << 30


def main(task: str, seconds: str, parent: str, library: str, modules: str, *arguments: str) -> None:
    """Run a task. This function does not return."""
    _limit(float(seconds), int(parent))
    # The driver's library may print; only answers belong on stdout.
    answers = os.dup(1)
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        text = json.dumps(answer).encode() + b"\n"
        while text:
            text = text[os.write(answers, text) :]

    status = 1
    try:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        sys.path += [modules, _ROOT]
        from importlib import import_module  # noqa: PLC0415 - found only with the path above

        from hooks.node.nvml_probe import import_pynvml  # noqa: PLC0415 - the same

        nvml = import_pynvml()
        nvml.nvmlInit()
        import_module(TASKS[task]).run(nvml, say, *arguments)
        status = 0
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the last answer
        say({"error": f"{type(error).__name__}: {error}"})
    # No nvmlShutdown: it can hang as well, and the kernel cleans up.
    os._exit(status)


def _limit(seconds: float, parent: int) -> None:
    """Limit the child's life and memory, and reset its signals.

    Args:
        seconds: the time after which it ends; 0 for no limit.
        parent: the process whose exit ends the child; 0 for none. If the child has another parent
            by now, that process has exited.
    """
    for number in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.setitimer(signal.ITIMER_REAL, seconds)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_MEMORY, _MOST_MEMORY))
    if parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
