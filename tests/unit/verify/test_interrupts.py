"""Signals are handled once, and only where nothing is half done."""

from __future__ import annotations

import signal

import pytest

from integration.verify.interrupts import Interrupts


def test_a_signal_ends_what_is_done_as_shells_tell_it() -> None:
    with Interrupts(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    with Interrupts(), pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM


def test_a_signal_waits_for_what_is_half_made() -> None:
    reached = []

    def call(interrupts: Interrupts) -> None:
        with interrupts.postponed():
            signal.raise_signal(signal.SIGINT)
            reached.append("the answer")

    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        call(interrupts)
    assert reached == ["the answer"]


def test_a_signal_that_waits_is_heeded_though_the_call_fails() -> None:
    def refused(interrupts: Interrupts) -> None:
        with interrupts.postponed():
            signal.raise_signal(signal.SIGTERM)
            raise ValueError("the call is refused")

    with Interrupts() as interrupts:
        with pytest.raises(SystemExit):
            refused(interrupts)
        with interrupts.postponed():
            pass  # it was handled, and is not handled again


def test_while_all_is_removed_signals_are_of_no_effect() -> None:
    with Interrupts() as interrupts:
        interrupts.ignore()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)


def test_the_handlers_of_before_are_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
