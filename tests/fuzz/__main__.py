"""``python -m tests.fuzz``: fuzz each target for its share of some minutes, guided by coverage.

Each target runs in its own process, because libFuzzer ends its process when it is done or has
found a defect. The inputs that it learned are kept in ``.cache/fuzz/NAME``, so that the next run
continues from there. An input that shows a defect is written there too, and its name is printed;
once the defect is fixed, the input belongs in ``corpus/NAME``.

Without atheris (it is built for some versions of CPython only) the mutations are blind, and the
program says so.
"""

from __future__ import annotations

import argparse
import glob
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from types import FunctionType
from typing import Final

from tests.fuzz.mutations import mutants
from tests.fuzz.targets import CORPUS, LONGEST_INPUT, SECONDS, TARGETS, attempt, in_memory

_CACHE: Final = os.path.join(os.path.dirname(CORPUS), "..", "..", ".cache", "fuzz")
_MEMORY: Final = 1024  # MiB that one process may take, the interpreter's own included


def main() -> int:
    """Fuzz; return 1 if a defect was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", choices=[[], *TARGETS], metavar="TARGET")
    parser.add_argument("--minutes", type=float, default=5, help="for all of them together")
    parser.add_argument("--child", choices=("guided", "blind"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.targets or list(TARGETS)
    seconds = 60 * options.minutes / len(names)
    if options.child:
        run = _guided if options.child == "guided" else _blind
        return run(names[0], seconds)
    guided = importlib.util.find_spec("atheris") is not None
    if not guided:
        _say("no atheris for this Python: the mutations are blind, coverage does not guide them")
    failed = [name for name in names if not _fuzz(name, seconds, guided=guided)]
    _say(f"defects in: {', '.join(failed)}" if failed else "no defect found")
    return 1 if failed else 0


def _fuzz(name: str, seconds: float, *, guided: bool) -> bool:
    """Fuzz one target in a process; return whether it found nothing."""
    directory = _directory(name)
    kind = "guided" if guided else "blind"
    argv = [sys.executable, "-m", "tests.fuzz", "--child", kind, name]
    log = os.path.join(directory, "log")
    before = set(_findings(name))
    argv += ["--minutes", f"{seconds / 60:.4f}"]
    # libFuzzer ends its process without a word to Python, which cannot clean up there.
    with (
        open(log, "wb") as file,
        tempfile.TemporaryDirectory(prefix="nvshim-fuzz-", dir=in_memory()) as scratch,
    ):
        environment = {**os.environ, "TMPDIR": scratch}
        done = subprocess.run(argv, stdout=file, stderr=file, check=False, env=environment)
    found = sorted(set(_findings(name)) - before)
    with open(log, encoding="utf-8", errors="replace") as file:
        lines = file.read().splitlines()
    told = next((line for line in reversed(lines) if "DONE" in line or "tried" in line), "")
    _say(f"{name:15} {'ok' if done.returncode == 0 else 'DEFECT'}  {' '.join(told.split())}")
    for path in found:
        _say(f"  {os.path.normpath(path)}")
    if done.returncode:
        _say("\n".join(f"  | {line}" for line in lines[-40:]))
    return done.returncode == 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _findings(name: str) -> list[str]:
    kinds = ("crash", "timeout", "oom", "slow-unit")
    return [path for kind in kinds for path in glob.glob(f"{_directory(name)}/{kind}-*")]


def _directory(name: str) -> str:
    directory = os.path.join(_CACHE, name)
    os.makedirs(os.path.join(directory, "corpus"), exist_ok=True)
    return directory


def _guided(name: str, seconds: float) -> int:
    import atheris  # noqa: PLC0415 - not available on all platforms

    directory = _directory(name)
    words = os.path.join(directory, "words")
    with open(words, "w", encoding="ascii") as file:
        escaped = ("".join(f"\\x{byte:02x}" for byte in word) for word in TARGETS[name].words)
        file.writelines(f'"{word}"\n' for word in escaped)
    for function in _ours():
        atheris.instrument_func(function)
    flags = (
        f"-max_total_time={max(1, round(seconds))}",
        f"-max_len={LONGEST_INPUT}",
        f"-timeout={5 * SECONDS:.0f}",
        f"-rss_limit_mb={_MEMORY}",
        f"-artifact_prefix={directory}/",
        f"-dict={words}",
        "-use_value_profile=1",
        "-verbosity=1",
    )
    corpora = (os.path.join(directory, "corpus"), os.path.join(CORPUS, name))
    atheris.Setup([sys.argv[0], *flags, *corpora], lambda data: attempt(TARGETS[name], data))
    atheris.Fuzz()  # ends the process
    return 0


def _ours() -> Iterator[FunctionType]:
    """Return all loaded functions of the project, to instrument them for coverage."""
    for module, found in list(sys.modules.items()):
        if module.partition(".")[0] not in {"api", "hooks", "integration", "shim"}:
            continue
        classes = [kind for kind in vars(found).values() if isinstance(kind, type)]
        for scope in (found, *(kind for kind in classes if kind.__module__ == module)):
            for each in vars(scope).values():
                function = getattr(each, "__func__", each)  # of a class method
                if isinstance(function, FunctionType) and function.__module__ == module:
                    yield function


def _blind(name: str, seconds: float) -> int:
    seeds = []
    for path in sorted(glob.glob(f"{CORPUS}/{name}/*")):
        with open(path, "rb") as file:
            seeds.append(file.read())
    until = time.monotonic() + seconds
    number = 0
    for number, data in enumerate(mutants(seeds, TARGETS[name].words, time.time_ns()), 1):
        began = time.monotonic()
        try:
            attempt(TARGETS[name], data[:LONGEST_INPUT])
            assert time.monotonic() - began < 5 * SECONDS, "too slow"
        except BaseException:
            with open(f"{_directory(name)}/crash-{number}", "wb") as file:
                file.write(data)
            raise
        if time.monotonic() > until:
            break
    _say(f"tried {number} mutations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
