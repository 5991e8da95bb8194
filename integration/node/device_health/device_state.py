"""What is thought of one device: a state machine, and what moves it.

::

        ┌── suspect ──▶ suspect ── bad ──▶ unhealthy ◀── bad ──┐
        │                  │                 ▲    │             │
     healthy ◀── quiet ────┘                 │    └─ answers ─▶ recovering
      ▲ └────────────── bad ─────────────────┘                  │
      └──────────────────────── quiet ──────────────────────────┘

Rules
- One error that is suspect makes a device suspect, and it is still given; so many of them in a
  window make it unhealthy. An error that is unhealthy or fatal does so at once, and so does a
  device that does not answer.
- While it recovers every error that counts is bad.
- There is no way back but by proof. An unhealthy device that answers, of which nothing is pending,
  is recovering; when it has answered without an error for the quiet time, it is healthy. What was
  fatal needs a reset before: the device itself was lost and answers again, the driver was loaded
  anew, or it counts from zero.
- Each time that it fails again the quiet time doubles, up to a bound; after so long without a
  failure it is the first again.
- NVML that is silent makes a device suspect, and after a while unhealthy: nobody would hear of
  what happens to it. One whose events cannot be had, but which answers, stays suspect.
- What the driver itself says that a device needs to recover is obeyed, as with Xid 154: a reset or
  more is a fatal error, and that it needs nothing any more is a reset.
- What lasts (rows of memory that could not be remapped, or wait to be) counts when it begins. So
  who puts such a device back by hand has it back.
- A person may put a device back; one that is lost stays unhealthy.

All is pure: the time is given, and what holds a device back is in its :class:`Condition`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import Final, NamedTuple, TypeAlias, assert_never

from integration.node.faults.xids import Severity
from integration.node.values.health import State


class Cause(StrEnum):
    """What moves a device from one state to another."""

    SUSPECT = "suspect"
    BAD = "bad"
    ANSWERS = "answers"
    QUIET = "quiet"
    CLEAR = "clear"


TRANSITIONS: Final[Mapping[tuple[State, Cause], State]] = {
    (State.HEALTHY, Cause.SUSPECT): State.SUSPECT,
    (State.HEALTHY, Cause.BAD): State.UNHEALTHY,
    (State.SUSPECT, Cause.BAD): State.UNHEALTHY,
    (State.SUSPECT, Cause.QUIET): State.HEALTHY,
    (State.SUSPECT, Cause.CLEAR): State.HEALTHY,
    (State.UNHEALTHY, Cause.ANSWERS): State.RECOVERING,
    (State.UNHEALTHY, Cause.CLEAR): State.HEALTHY,
    (State.RECOVERING, Cause.BAD): State.UNHEALTHY,
    (State.RECOVERING, Cause.QUIET): State.HEALTHY,
    (State.RECOVERING, Cause.CLEAR): State.HEALTHY,
}
"""Where each cause leads; a device stays where it is for every other."""


class Need(IntEnum):
    """What an unhealthy device has to show before it can be healthy."""

    NOTHING = 0
    PROOF = 1
    RESET = 2


class Moment(NamedTuple):
    """A time: ``boot`` in seconds since boot, which is reckoned with; ``epoch`` for people."""

    boot: float
    epoch: float


@dataclass(frozen=True, slots=True)
class Rules:
    """How patient one is; times in seconds."""

    suspects: int = 3  # so many errors in a window make a suspect device unhealthy
    window: float = 600.0  # how long it is
    patience: float = 30.0  # how long NVML may be silent
    quiet: float = 20.0  # how long a device has to answer without an error
    longest: float = 3600.0  # up to what that doubles


@dataclass(frozen=True, slots=True)
class Condition:
    """What is known of one device; times in seconds since boot."""

    state: State = State.HEALTHY  # what is thought of it
    since: float = 0.0  # when it came to be so, in seconds since the epoch
    reason: str = ""  # why, for people
    xid: int = 0  # the last that counted; 0 for none
    # whether an error of the device alone, and not of all of its GPU, made it what it is
    own: bool = False
    remedy: str = ""  # what a person can do
    blamed: tuple[str, ...] = ()  # the containers that its reason is attributed to
    need: Need = Need.NOTHING  # what it has to show
    errors: tuple[float, ...] = ()  # when errors counted, in the window
    last_error: float = 0.0  # when there was the last, or the last silence
    answers_since: float = 0.0  # since when it recovers
    silent_since: float | None = None  # since when NVML is silent; None if it is not
    lost: str = ""  # why it does not answer; "" if it does
    was_away: bool = False  # whether it was itself what did not answer, since it answered last
    unwatched: str = ""  # why its events cannot be had; "" if they can
    pending: bool = False  # whether rows of its memory wait to be remapped
    failed: bool = False  # whether rows could not be remapped
    asks: str = ""  # what the driver says that it needs to recover; "" for nothing
    falls: int = 0  # how often it failed, one time after the other
    fell: float = 0.0  # when it did so last


@dataclass(frozen=True, slots=True)
class Error:
    """An error of it."""

    severity: Severity  # what it makes of a device
    reason: str  # for people
    xid: int = 0  # its number; 0 for none
    remedy: str = ""  # what a person can do
    blamed: tuple[str, ...] = ()  # the containers that it is attributed to
    counts: bool = True  # whether several of it make a suspect device unhealthy
    times: int = 1  # how many of it there were
    is_its_own: bool = False  # whether it is of a MIG device, and not of all of its GPU


@dataclass(frozen=True, slots=True)
class Contained:
    """What was told of a memory error proves that it was contained: no reset is needed for it."""

    xid: int


@dataclass(frozen=True, slots=True)
class Lost:
    """It does not answer, while others do, or is not there."""

    why: str  # for people
    remedy: str = "reset the GPU, or reboot the node"  # what a person can do
    # whether the device itself was gone, so that whatever brings it back is a reset
    is_its_own: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """It answers, and says so much of its memory."""

    pending: bool = False  # whether rows of it wait to be remapped
    failed: bool = False  # whether rows could not be
    # what the driver says that the device needs to recover; "" for nothing, None if it does not say
    asks: str | None = None


@dataclass(frozen=True, slots=True)
class Silence:
    """NVML does not answer, for any device."""

    why: str


@dataclass(frozen=True, slots=True)
class Watch:
    """Its events can be had, or not: that is why."""

    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Reset:
    """It was reset, or its driver loaded anew."""


@dataclass(frozen=True, slots=True)
class Clear:
    """A person puts it back."""


Signal: TypeAlias = Error | Contained | Lost | Answer | Silence | Watch | Reset | Clear


def step(condition: Condition, signal: Signal, now: Moment, rules: Rules) -> Condition:
    """What is thought of a device after something was heard of it."""
    match signal:
        case Error():
            return _after_error(condition, signal, now, rules)
        case Contained(xid):
            if condition.xid == xid and condition.need == Need.RESET and not condition.lost:
                return replace(condition, need=Need.PROOF)
            return condition
        case Lost(why, remedy, is_its_own):
            was_away = condition.was_away or is_its_own
            known = replace(condition, lost=why, was_away=was_away, last_error=now.boot)
            return _bad(known, Need.PROOF, why, now, rules, remedy=remedy)
        case Answer():
            return _after_answer(condition, signal, now, rules)
        case Silence(why):
            return _after_silence(condition, why, now, rules)
        case Watch(why):
            known = replace(condition, unwatched=why)
            return _suspected(known, f"its errors are not heard: {why}", now) if why else known
        case Reset():
            need = min(condition.need, Need.PROOF)
            return replace(condition, need=need, pending=False, failed=False, errors=())
        case Clear():
            return _after_clear(condition, now)
        case _:
            assert_never(signal)


_OF_ROWS: Final = "reset the GPU; if it comes back, have it replaced"
_ASKED: Final = "the driver says that it has to be recovered"
_OF_PENDING: Final = "reset the GPU when it is free (nvidia-smi --gpu-reset)"


def _after_error(condition: Condition, error: Error, now: Moment, rules: Rules) -> Condition:
    if error.severity == Severity.IGNORE:
        return condition
    recent = [when for when in condition.errors if now.boot - when < rules.window]
    if error.counts:
        # Of a storm as many are kept as can matter.
        recent += [now.boot] * min(error.times, rules.suspects)
    errors = tuple(recent[-rules.suspects :])
    own = condition.own or error.is_its_own
    known = replace(condition, errors=errors, last_error=now.boot, own=own)
    if error.severity == Severity.SUSPECT and len(errors) < rules.suspects:
        if condition.state == State.RECOVERING and error.counts:
            return _bad(known, Need.PROOF, error.reason, now, rules, of=error)
        if not condition.state.is_given:
            return known
        noted = replace(known, xid=error.xid or known.xid, blamed=_with(known.blamed, error.blamed))
        return _suspected(noted, error.reason, now, remedy=error.remedy)
    reason = error.reason
    if error.severity == Severity.SUSPECT:
        reason = f"{reason}, and {len(errors)} errors in {rules.window:g} s"
    need = Need.RESET if error.severity == Severity.FATAL else Need.PROOF
    return _bad(known, need, reason, now, rules, of=error)


def _after_answer(condition: Condition, answer: Answer, now: Moment, rules: Rules) -> Condition:
    known = replace(condition, lost="", was_away=False, silent_since=None)
    if condition.was_away:
        # Whatever brought it back is the reset that it needed.
        known = step(known, Reset(), now, rules)
    if answer.asks is not None and answer.asks != known.asks:
        known = replace(known, asks=answer.asks)
        if answer.asks:
            known = replace(known, last_error=now.boot)
            return _bad(known, Need.RESET, _ASKED, now, rules, remedy=answer.asks)
        known = step(known, Reset(), now, rules)
    failed, pending = answer.failed and not known.failed, answer.pending and not known.pending
    known = replace(known, failed=answer.failed, pending=answer.pending)
    if failed:
        reason = "rows of its memory could not be remapped"
        known = replace(known, last_error=now.boot)
        return _bad(known, Need.RESET, reason, now, rules, remedy=_OF_ROWS)
    if pending:
        known = _suspected(known, "rows of its memory wait to be remapped", now, _OF_PENDING)
    if known.state == State.UNHEALTHY and known.need < Need.RESET and not answer.pending:
        state = TRANSITIONS[known.state, Cause.ANSWERS]
        return replace(known, state=state, since=now.epoch, answers_since=now.boot)
    if not known.pending and now.boot >= due(known, rules):  # it has proven what it had to
        healthy = replace(
            known,
            state=TRANSITIONS[known.state, Cause.QUIET],
            since=now.epoch,
            need=Need.NOTHING,
            reason="",
            own=False,
            remedy="",
            blamed=(),
            errors=(),
        )
        if known.unwatched:
            return _suspected(healthy, f"its errors are not heard: {known.unwatched}", now)
        return healthy
    return known


def due(condition: Condition, rules: Rules) -> float:
    """When it has to be asked for what it may have become by then.

    Returns:
        Seconds since boot; infinite if time alone changes nothing.
    """
    if condition.state == State.UNHEALTHY:
        return math.inf
    if condition.silent_since is not None:
        return condition.silent_since + rules.patience
    if condition.state == State.RECOVERING:
        since = max(condition.answers_since, condition.last_error)
        return since + _quiet_time(condition, rules)
    if condition.state == State.SUSPECT and not condition.pending and not condition.unwatched:
        calm = condition.last_error + rules.quiet
        return max([calm, *(when + rules.window for when in condition.errors)])
    return math.inf


def _quiet_time(condition: Condition, rules: Rules) -> float:
    doubled = rules.quiet * 2.0 ** min(max(condition.falls - 1, 0), 32)
    return max(rules.quiet, min(doubled, rules.longest))


def _after_silence(condition: Condition, why: str, now: Moment, rules: Rules) -> Condition:
    since = now.boot if condition.silent_since is None else condition.silent_since
    known = replace(condition, silent_since=since, last_error=now.boot)
    reason = f"NVML does not answer: {why}"
    if known.state == State.UNHEALTHY:
        return known
    if now.boot - since >= rules.patience:
        return _bad(known, Need.PROOF, reason, now, rules)
    return _suspected(known, reason, now)  # one that recovers waits until there is an answer


def _after_clear(condition: Condition, now: Moment) -> Condition:
    if condition.lost or condition.state == State.HEALTHY:
        return condition
    return replace(
        condition,
        state=TRANSITIONS[condition.state, Cause.CLEAR],
        since=now.epoch,
        reason="put back by hand",
        own=False,
        remedy="",
        blamed=(),
        need=Need.NOTHING,
        errors=(),
        silent_since=None,
        falls=0,
    )


def _suspected(condition: Condition, reason: str, now: Moment, remedy: str = "") -> Condition:
    state = condition.state
    if state == State.SUSPECT:  # what came last is the reason
        return replace(condition, reason=reason, remedy=remedy)
    if state != State.HEALTHY:
        return condition
    state = TRANSITIONS[state, Cause.SUSPECT]
    return replace(condition, state=state, since=now.epoch, reason=reason, remedy=remedy)


def _bad(
    condition: Condition,
    need: Need,
    reason: str,
    now: Moment,
    rules: Rules,
    *,
    of: Error | None = None,
    remedy: str = "",
) -> Condition:
    """It is not given any more, or still not."""
    was = condition.state
    known = replace(condition, need=max(condition.need, need))
    if was == State.UNHEALTHY and need < condition.need:
        return known  # of two reasons the one that is harder to be rid of
    if of is not None:
        # A device that comes to be so now owes nothing to whom it suspected before.
        before = condition.blamed if was == State.UNHEALTHY else ()
        known = replace(known, xid=of.xid or known.xid, blamed=_with(before, of.blamed))
    elif was != State.UNHEALTHY:
        known = replace(known, blamed=())
    known = replace(known, reason=reason, remedy=of.remedy if of is not None else remedy)
    if was == State.UNHEALTHY:
        return known
    again = bool(known.falls) and now.boot - known.fell < _quiet_time(known, rules) + rules.longest
    return replace(
        known,
        state=TRANSITIONS[was, Cause.BAD],
        since=now.epoch,
        falls=known.falls + 1 if again else 1,
        fell=now.boot,
    )


_MOST_BLAMED: Final = 16


def _with(blamed: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*blamed, *more)))[-_MOST_BLAMED:]
