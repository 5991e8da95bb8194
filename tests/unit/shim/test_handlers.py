"""A signal that arrives while its handler is being restored is not lost, and is not an error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.launcher import REPOSITORY

# The signal arrives after the interpreter's check for signals, but before the system call.
_RACE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>

int sigaction(int number, const struct sigaction *action, struct sigaction *before)
{
    int (*real)(int, const struct sigaction *, struct sigaction *) = dlsym(RTLD_NEXT, "sigaction");
    const char *wanted = getenv("RACE");

    if (action && wanted && number == atoi(wanted)
        && (action->sa_handler == SIG_DFL || action->sa_handler == SIG_IGN))
        raise(number);
    return real(number, action, before);
}
"""

_ERROR = "ignored due to race condition"

# How each program handles a signal; "it" is the number.
_BY_HAND = "before = signal.signal(it, lambda *_: None); signal.signal(it, before)"
_LOOP = """
from shim import loop
async def main():
    with loop.handle_signals({it: lambda: None}):
        pass
loop.run(main)
"""
_RECEIVER = """
from tests.harness.signals import open_signal_receiver
with open_signal_receiver(it):
    pass
"""
_IGNORED = f"signal.signal(it, signal.SIG_IGN)\n{_LOOP}"
_VERIFY = """
from integration.verify.interrupts import Interrupts
with Interrupts():
    pass
"""
_AGENT = """
import anyio
from integration.signal_receiver import open_signal_receiver
async def main():
    with open_signal_receiver(it):
        pass
anyio.run(main)
"""
_CHILD = """
import os
from shim import forked
def child():
    {begin}
    print("goes on", flush=True)
    os._exit(0)
signal.signal(it, lambda *_: None)
pid = {fork}
os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xff)
"""
_SPARE = _CHILD.format(begin="forked.lead_group()", fork="forked.fork(child, (signal.SIGTERM,))")
_WORKER = _CHILD.format(
    begin="forked.set_up_child(os.getppid(), {0, 1, 2})", fork="forked.fork(child)"
)
_ASKED = """
from integration.kubernetes import engine_query
signal.signal(it, lambda *_: None)
engine_query._ask = lambda _: None
try:
    engine_query.query_engine("/")
except ConnectionError:
    print("no answer", flush=True)
"""


@pytest.fixture(scope="module")
def race(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("race") / "race.so"
    command = ["gcc", "-shared", "-fPIC", "-o", str(path), "-x", "c", "-"]
    subprocess.run(command, input=_RACE, text=True, check=True)
    return str(path)


def run(race: str, program: str, number: int) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LD_PRELOAD": race, "PYTHONPATH": REPOSITORY}
    start = f"import os, signal\nit = {number:d}\nos.environ['RACE'] = str(it)\n"
    return subprocess.run(
        [sys.executable, "-c", start + program],
        env=environment, capture_output=True, text=True, check=False, cwd="/",
    )  # fmt: skip


def test_by_hand_it_is_an_error(race: str) -> None:
    done = run(race, _BY_HAND, signal.SIGCHLD)
    assert (done.returncode, _ERROR in done.stderr) == (0, True)


@pytest.mark.parametrize(
    "program", [_LOOP, _RECEIVER, _IGNORED, _WORKER], ids=["loop", "tests", "ignored", "worker"]
)
def test_it_is_dropped_where_the_default_is_to_drop_it(race: str, program: str) -> None:
    done = run(race, program, signal.SIGCHLD)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "program", [_LOOP, _RECEIVER, _VERIFY, _AGENT], ids=["loop", "tests", "verify", "agent"]
)
def test_it_ends_the_process_where_that_is_the_default(race: str, program: str) -> None:
    done = run(race, program, signal.SIGTERM)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")


def test_it_ends_a_process_that_was_forked_to_be_a_shim(race: str) -> None:
    done = run(race, _SPARE, signal.SIGINT)
    assert (done.returncode, done.stdout, done.stderr) == (256 - signal.SIGINT, "", "")


def test_it_ends_the_child_that_asks_an_engine(race: str, tmp_path: Path) -> None:
    done = run(race, _ASKED, signal.SIGTERM)
    assert (done.returncode, done.stdout, done.stderr) == (0, "no answer\n", "")
