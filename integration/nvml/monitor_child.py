"""The child that talks with NVML for the agent: a program of its own, run by path.

    python3 -I -S monitor_child.py EVENTS|SAMPLES LIBRARY MODULES PARENT

It ends with its parent, whose process id PARENT is, and so with the agent, however that ends. It
says one JSON object a line; the last one may be ``{"error": …}``. What else it says, and what it is
asked, is in :mod:`.watcher_child` (EVENTS) and :mod:`.sampler_child` (SAMPLES).

LIBRARY is the driver root's libnvidia-ml, and is loaded by its path. glibc then answers
pynvml's request for "libnvidia-ml.so.1" with it, for it has that soname. MODULES is the directory
where pynvml is: an isolated interpreter does not look there itself, and nothing of the agent's is
imported but these modules.

Source: prctl(2), PR_SET_PDEATHSIG; setrlimit(2).
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any

EVENTS, SAMPLES = "events", "samples"

_PR_SET_PDEATHSIG = 1
_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 2))
# NVML needs some tens of MiB. One that lies about a count makes pynvml ask for the room.
_MOST_MEMORY = 4 << 30


def main(what: str, library: str, modules: str, parent: str) -> None:
    """Talks until it is ended. Does not return."""
    die_with(int(parent))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_MEMORY, _MOST_MEMORY))
    # The driver's library may print; our words alone belong on stdout.
    words = os.dup(1)
    os.dup2(2, 1)

    def say(word: dict[str, Any]) -> None:
        text = json.dumps(word).encode() + b"\n"
        while text:
            text = text[os.write(words, text) :]

    try:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        sys.path += [modules, _ROOT]
        from hooks.node.nvml_probe import import_pynvml  # noqa: PLC0415 - found only now

        pynvml = import_pynvml()
        if what == EVENTS:
            from integration.nvml.watcher_child import watch  # noqa: PLC0415 - likewise

            watch(pynvml, say)
        else:
            from integration.nvml.sampler_child import answer  # noqa: PLC0415 - likewise

            answer(pynvml, say)
    except BrokenPipeError:  # nobody listens any more
        pass
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the last word
        say({"error": f"{type(error).__name__}: {error}"})
    # No nvmlShutdown: it can hang as well, and the kernel cleans up after us.
    os._exit(1)


def die_with(parent: int) -> None:
    """End when another process does.

    Args:
        parent: its process id. If that is not our parent's any more, it has ended already.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
