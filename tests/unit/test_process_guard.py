"""A test that changes its own process fails, and other tests do not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.harness.launcher import REPOSITORY

_GUILTY = {
    "handler of signal 17": "signal.signal(signal.SIGCHLD, lambda *_: None)",
    "status SigBlk": "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})",
    "status ShdPnd": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1});"
        "os.kill(os.getpid(), signal.SIGUSR1)"
    ),
    "status Umask": "os.umask(0o123)",
    "process wakeup descriptor": (
        "left.append(os.pipe2(os.O_NONBLOCK)); signal.set_wakeup_fd(left[-1][1])"
    ),
    "process working directory": "os.chdir('/')",
    "process subreaper": "syscalls.set_child_subreaper()",
    "process oom_score_adj": "open('/proc/self/oom_score_adj', 'w').write('7')",
    "process nice value": "os.nice(1)",
    "environment LEFT": "os.environ['LEFT'] = '1'",
    "environment GIVEN": "del os.environ['GIVEN']",
    "limit RLIMIT_NOFILE": (
        "resource.setrlimit(resource.RLIMIT_NOFILE,"
        " (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))"
    ),
    "limit RLIMIT_AS": (
        "resource.setrlimit(resource.RLIMIT_AS,"
        " (1 << 46, resource.getrlimit(resource.RLIMIT_AS)[1]))"
    ),
    "timer virtual": "signal.setitimer(signal.ITIMER_VIRTUAL, 1000)",
    "interpreter gc": "gc.disable()",
    "interpreter sys.path": "sys.path.append('/left')",
    "interpreter recursion limit": "sys.setrecursionlimit(1234)",
    "child": "left.append(subprocess.Popen(['sleep', '1000']))",
    "child (a zombie)": "left.append(subprocess.Popen(['true']))",
    "thread": "left.append(threading.Thread(target=end.wait, daemon=True)); left[-1].start()",
    "descriptor": "left.append(os.open('/dev/null', os.O_RDONLY))",
    "descriptor (closed)": "os.close(held.pop())",
    "descriptor (another)": "os.dup2(0, held[-1])",
}

_FILE = """
import atexit, gc, os, pytest, resource, select, signal, subprocess, sys, threading
from shim import syscalls
from tests.harness.own_process import outliving, restored

left, end = [], threading.Event()
polled = [select.epoll()]
held = [os.open("/dev/zero", os.O_RDONLY) for _ in range(2)]
atexit.register(lambda: [each.kill() for each in left if isinstance(each, subprocess.Popen)])

@pytest.fixture(scope="module")
def daemon():
    with subprocess.Popen(["sleep", "1000"], stdout=subprocess.PIPE) as process:
        yield process
        process.kill()

@pytest.fixture(scope="module")
def changed():
    os.environ["CHANGED"] = "1"
    os.umask(0o27)
    yield

@pytest.fixture
def own():
    with subprocess.Popen(["sleep", "1000"], stdout=subprocess.PIPE) as process:
        yield process
        process.kill()

def test_innocent_of_what_the_module_has(changed, daemon, own): pass

def test_innocent_of_what_it_asks_a_fixture_of_the_module_for(request):
    request.getfixturevalue("again")

@pytest.fixture(scope="module")
def again():
    left.append(os.dup(0))
    yield

def test_innocent_of_what_outlives_it():
    with outliving():
        left.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE))

def test_innocent_of_a_daemon_that_it_starts_again():
    left[-1].kill()
    left[-1].communicate()
    with outliving():
        left[-1] = subprocess.Popen(["cat"], stdin=subprocess.PIPE)

@pytest.fixture(scope="class")
def server():
    thread = threading.Thread(target=end.wait)
    thread.start()
    yield
    end.set()
    thread.join()
    end.clear()

class TestServed:
    def test_innocent_of_what_a_shared_server_does(self, server):
        threading.Thread(target=end.wait).start()
        left.append(os.dup(0))

def test_innocent_of_what_is_restored():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with restored():
        os.umask(0o77)
        os.environ["LEFT"] = "1"
        os.chdir("/")
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

def test_innocent_of_what_ends_by_itself():
    threading.Timer(0.05, lambda: None).start()

def test_innocent_of_what_a_library_closes_late():
    polled.pop().close()

def test_that_fails():
    assert not held

def test_innocent_of_what_is_collected():
    class Cycle: pass
    cycle = Cycle()
    cycle.own, cycle.fds = cycle, os.pipe()
    import weakref
    weakref.finalize(cycle, lambda fds=cycle.fds: [os.close(fd) for fd in fds])
"""


def run_guarded(directory: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the tests in a directory with the guard."""
    options = ["-p", "tests.harness.process_guard", "-p", "no:cacheprovider", "-q", "--timeout=100"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *more, "test_file.py"],
        env={**os.environ, "PYTHONPATH": REPOSITORY, "GIVEN": "1", "NVSHIM_PATIENCE": "0.05"},
        cwd=directory, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the result of each test: empty, or the text of its error."""
    directory = tmp_path_factory.mktemp("guarded")
    tests = [_FILE]
    for number, line in enumerate(_GUILTY.values()):
        tests.append(f"def test_guilty_{number}():\n    {line}\n")
        tests.append(f"def test_neighbour_{number}(): pass\n")
    (directory / "test_file.py").write_text("\n".join(tests))
    done = run_guarded(directory, "--junit-xml=report.xml")
    found: dict[str, str] = {}
    for case in ET.parse(directory / "report.xml").iter("testcase"):
        name = case.attrib["name"]
        found[name] = found.get(name, "") + "".join(each.text or "" for each in case)
    assert found, done.stdout + done.stderr
    return found


@pytest.mark.parametrize("what", _GUILTY)
def test_who_changes_it_fails_and_the_next_test_does_not(
    outcomes: dict[str, str], what: str
) -> None:
    number = [*_GUILTY].index(what)
    first, *lines = outcomes[f"test_guilty_{number}"].splitlines()
    assert first == "the test has changed its own process:"
    assert lines[0].startswith(what.partition(" (")[0])
    assert outcomes[f"test_neighbour_{number}"] == ""


def test_who_changes_nothing_or_puts_it_back_does_not_fail(outcomes: dict[str, str]) -> None:
    innocent = {name: text for name, text in outcomes.items() if "innocent" in name}
    assert innocent == dict.fromkeys(innocent, "")
    assert len(innocent) == _FILE.count("def test_innocent")


def test_one_that_fails_has_not_changed_the_timer_that_is_stopped_then(
    outcomes: dict[str, str],
) -> None:
    assert "assert not held" in outcomes["test_that_fails"]
    assert "changed" not in outcomes["test_that_fails"]


def test_a_run_that_is_interrupted_ends_without_an_error_of_the_guard(tmp_path: Path) -> None:
    (tmp_path / "test_file.py").write_text("def test_it():\n    raise KeyboardInterrupt\n")
    done = run_guarded(tmp_path)
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert "KeyboardInterrupt" in done.stdout
    assert "Error" not in done.stdout + done.stderr
