"""Containers and execs on a terminal, with a real one around ``ctr``."""

from __future__ import annotations

import contextlib

from tests.harness.runtime import Container, Runtime
from tests.harness.terminal import Terminal
from tools.images import GLIBC

# Runs commands until the terminal is closed, and prints each exit code.
SHELL = ("sh", "-c", "trap : INT; while read -r line; do $line; echo code $?; done")


def _run(
    runtime: Runtime, *command: str, image: str = GLIBC, rows: int = 24, columns: int = 80
) -> tuple[Container, Terminal]:
    container = runtime.expect()
    words = runtime.words(*command, image=image, name=container.name, flags=("--rm", "--tty"))
    return container, Terminal(runtime.containerd.ctr_argv(*words), rows=rows, columns=columns)


def _exec(container: Container, *command: str, rows: int = 24, columns: int = 80) -> Terminal:
    words = container.exec_words(*command, flags=["--tty"])
    argv = container.runtime.containerd.ctr_argv(*words)
    return Terminal(argv, rows=rows, columns=columns)


def _resize(tty: Terminal, rows: int, columns: int) -> None:
    """Resize until the container sees it.

    ctr sets the size first and listens for changes afterwards; a change in between is lost.
    """
    for _ in range(10):
        tty.resize(rows, columns + 1)
        tty.resize(rows, columns)
        with contextlib.suppress(AssertionError):
            tty.wait_for(f"\n{rows} {columns}\r\n", timeout=1)
            return
    tty.wait_for(f"\n{rows} {columns}\r\n")


def _leave(tty: Terminal) -> None:
    """Interrupt the program that runs in :data:`SHELL`, and close the shell."""
    tty.type("\x03")
    tty.wait_for("code 130\r\n")
    tty.type("\x04")
    assert tty.wait() == 0


def test_a_container_has_a_terminal_on_all_three_descriptors_and_its_exit_code_comes_through(
    runtime: Runtime,
) -> None:
    script = "for fd in 0 1 2; do test -t $fd && echo fd $fd; done; exit 9"
    _, terminal = _run(runtime, "sh", "-c", script)
    with terminal as tty:
        assert tty.wait() == 9
        assert tty.screen == "fd 0\r\nfd 1\r\nfd 2\r\n"


def test_resizing_is_seen_inside(runtime: Runtime) -> None:
    _, terminal = _run(runtime, *SHELL, rows=33, columns=101)
    with terminal as tty:
        tty.type("probe winsize 1000\n")
        tty.wait_for("\n33 101\r\n")
        for rows, columns in ((50, 132), (10, 20)):
            _resize(tty, rows, columns)
        _leave(tty)


def test_control_c_interrupts_the_program_and_not_the_shell(runtime: Runtime) -> None:
    container, terminal = _run(runtime, *SHELL)
    with terminal as tty:
        tty.type("sleep 1000\n")
        tty.wait_for("sleep 1000\r\n")
        # No event shows that sleep has started; an earlier Ctrl-C has no effect.
        container.wait_for_program("sleep")
        tty.type("\x03")
        tty.wait_for("code 130\r\n")
        tty.type("true\n")
        tty.wait_for("code 0\r\n")
        tty.type("\x04")
        assert tty.wait() == 0


def test_what_is_typed_is_echoed_and_read(runtime: Runtime) -> None:
    _, terminal = _run(runtime, "cat")
    with terminal as tty:
        tty.type("hello\n")
        tty.wait_for("hello\r\nhello\r\n")
        tty.type("\x04")
        assert tty.wait() == 0


def test_an_exec_gets_a_terminal_of_its_own_and_its_exit_code_comes_through(
    runtime: Runtime,
) -> None:
    container = runtime.start_idle(image=GLIBC)
    with _exec(container, *SHELL, rows=21, columns=91) as tty:
        tty.type("probe winsize 1000\n")
        tty.wait_for("\n21 91\r\n")
        _resize(tty, 22, 92)
        _leave(tty)
    with _exec(container, "sh", "-c", "tty; exit 4") as tty:
        assert tty.wait() == 4
        assert "/dev/pts/" in tty.screen or "not found" in tty.screen
    assert container.status == "RUNNING"


def test_init_can_have_a_terminal_and_its_exec_none(runtime: Runtime) -> None:
    container, terminal = _run(runtime, *SHELL)
    with terminal as tty:
        tty.type("true\n")
        tty.wait_for("code 0\r\n")
        done = container.exec("sh", "-c", "test -t 1 || echo none; echo >&2 apart")
        assert (done.stdout, done.stderr) == ("none\n", "apart\n")
        tty.type("\x04")
        assert tty.wait() == 0


def test_a_program_may_close_its_terminal_and_open_it_again(runtime: Runtime) -> None:
    # As an init does that opens /dev/console for each message.
    closed = "exec <&- >&- 2>&-; until test $again; do sleep .1; done"
    script = f"trap again=1 USR1; echo one; {closed}; echo two >/dev/console"
    container, terminal = _run(runtime, "sh", "-c", script)
    with terminal as tty:
        tty.wait_for("one\r\n")
        container.wait_for_program("sleep")
        assert container.kill("USR1").code == 0
        assert tty.wait() == 0
        assert tty.screen == "one\r\ntwo\r\n"
