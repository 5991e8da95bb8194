"""The health of one device: a state machine and its transitions.

::

        ┌── suspect ──▶ suspect ── bad ──▶ unhealthy ◀── bad ──┐
        │                  │                 ▲    │             │
     healthy ◀── quiet ────┘                 │    └─ answers ─▶ recovering
      ▲ └────────────── bad ─────────────────┘                  │
      └──────────────────────── quiet ──────────────────────────┘

Rules
- One suspect error makes a device suspect; it is still allocated. Several within a window make it
  unhealthy. An unhealthy or fatal error does so at once, and so does a device that stops answering.
- While a device recovers, every error that counts makes it unhealthy again.
- A device becomes healthy again only by evidence. An unhealthy device that answers and has nothing
  pending is recovering; after answering without an error for the quiet time it is healthy. After a
  fatal error it needs a reset first: the device was lost and answers again, the driver was
  reloaded, or its counters restarted.
- Every repeated failure doubles the quiet time, up to a bound. After that long without a failure
  the quiet time starts from its first value.
- If NVML is silent, a device becomes suspect, and unhealthy after a while, because its errors would
  go unnoticed. A device that answers but delivers no events stays suspect.
- The driver's own recovery action decides, as with Xid 154: a reset or more counts as a fatal
  error, and "nothing left to recover" counts as a reset.
- A lasting defect (memory rows that are pending a remap, or could not be remapped, and the like)
  counts once, when it appears. So a person can return such a device to service.
- A person may return a device to service, except one that is lost.

The module does no I/O and reads no clock; callers pass the time. All state is in
:class:`Condition`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import IntEnum, StrEnum
from typing import Final, NamedTuple, TypeAlias, assert_never

from api.values import dataclass, replace
from integration.node.faults.xids import Severity
from integration.node.values.health import HealthState


class Cause(StrEnum):
    """The causes of transitions."""

    SUSPECT = "suspect"
    BAD = "bad"
    ANSWERS = "answers"
    QUIET = "quiet"
    CLEAR = "clear"


TRANSITIONS: Final[Mapping[tuple[HealthState, Cause], HealthState]] = {
    (HealthState.HEALTHY, Cause.SUSPECT): HealthState.SUSPECT,
    (HealthState.HEALTHY, Cause.BAD): HealthState.UNHEALTHY,
    (HealthState.SUSPECT, Cause.BAD): HealthState.UNHEALTHY,
    (HealthState.SUSPECT, Cause.QUIET): HealthState.HEALTHY,
    (HealthState.SUSPECT, Cause.CLEAR): HealthState.HEALTHY,
    (HealthState.UNHEALTHY, Cause.ANSWERS): HealthState.RECOVERING,
    (HealthState.UNHEALTHY, Cause.CLEAR): HealthState.HEALTHY,
    (HealthState.RECOVERING, Cause.BAD): HealthState.UNHEALTHY,
    (HealthState.RECOVERING, Cause.QUIET): HealthState.HEALTHY,
    (HealthState.RECOVERING, Cause.CLEAR): HealthState.HEALTHY,
}
"""The next state by state and cause; other causes change nothing."""


class Need(IntEnum):
    """What an unhealthy device needs before it can be healthy."""

    NOTHING = 0
    PROOF = 1
    RESET = 2


class Moment(NamedTuple):
    """A time: ``boot`` in seconds since boot, for arithmetic; ``epoch`` for display."""

    boot: float
    epoch: float


@dataclass(frozen=True, slots=True)
class Rules:
    """Thresholds; times in seconds."""

    suspects: int = 3  # this many errors within the window make a suspect device unhealthy
    window: float = 600.0
    patience: float = 30.0  # how long NVML may be silent
    quiet: float = 20.0  # how long a device must answer without an error
    longest: float = 3600.0  # upper bound of the doubled quiet time


@dataclass(frozen=True, slots=True)
class Condition:
    """The health of one device; times in seconds since boot."""

    state: HealthState = HealthState.HEALTHY
    since: float = 0.0  # when the state began, in seconds since the epoch
    reason: str = ""  # why, for display
    xid: int = 0  # the last Xid that counted; 0 for none
    own: bool = False  # whether an error of this device alone, not of its whole GPU, set the state
    remedy: str = ""  # what a person can do
    blamed: tuple[str, ...] = ()  # containers that the reason is attributed to
    need: Need = Need.NOTHING
    errors: tuple[float, ...] = ()  # when errors counted, within the window
    last_error: float = 0.0  # the last error or silence
    answers_since: float = 0.0  # when recovery started
    silent_since: float | None = None  # when NVML became silent; None if it answers
    lost: str = ""  # why the device does not answer; "" if it does
    was_away: bool = False  # whether the device itself, not NVML, stopped answering
    unwatched: str = ""  # why there are no events for it; "" if there are
    pending: bool = False  # whether a repair waits for a reset
    failed: bool = False  # whether memory is beyond repair
    asks: str = ""  # the recovery action that the driver names; "" for none
    falls: int = 0  # number of failures in a row
    fell: float = 0.0  # the last failure


@dataclass(frozen=True, slots=True)
class Error:
    """An error of the device."""

    severity: Severity
    reason: str  # for display
    xid: int = 0  # 0 for none
    remedy: str = ""  # what a person can do
    blamed: tuple[str, ...] = ()  # containers that it is attributed to
    counts: bool = True  # whether repetition makes a suspect device unhealthy
    times: int = 1  # number of occurrences
    is_its_own: bool = False  # whether it affects one MIG device only, not the whole GPU


@dataclass(frozen=True, slots=True)
class Contained:
    """Evidence that a memory error was contained: it needs no reset."""

    xid: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The device is missing, or does not answer while others do."""

    why: str  # for display
    remedy: str = "reset the GPU, or reboot the node"
    # whether the device itself was gone, so that its return implies a reset
    is_its_own: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """NVML answered, with this state of the device."""

    pending: str = ""  # which repair waits for a reset, for display; "" for none
    failed: str = ""  # what is beyond repair, for display; "" for nothing
    # the recovery action that the driver names; "" for none, None if it names nothing
    asks: str | None = None


@dataclass(frozen=True, slots=True)
class Silence:
    """NVML answers for no device."""

    why: str


@dataclass(frozen=True, slots=True)
class Watch:
    """Whether the device delivers events; if not, why."""

    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Reset:
    """The device was reset, or the driver was reloaded."""


@dataclass(frozen=True, slots=True)
class Clear:
    """A person returns the device to service."""


Signal: TypeAlias = Error | Contained | Lost | Answer | Silence | Watch | Reset | Clear


def step(condition: Condition, signal: Signal, now: Moment, rules: Rules) -> Condition:
    """Return the condition of a device after a signal."""
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
            return _suspected(known, f"its errors are not received: {why}", now) if why else known
        case Reset():
            need = min(condition.need, Need.PROOF)
            return replace(condition, need=need, pending=False, failed=False, errors=())
        case Clear():
            return _after_clear(condition, now)
        case _:
            assert_never(signal)


_OF_ROWS: Final = "reset the GPU; if it comes back, have it replaced"
_ASKED: Final = "the driver asks for a recovery"
_OF_PENDING: Final = "reset the GPU when it is free (nvidia-smi --gpu-reset)"


def _after_error(condition: Condition, error: Error, now: Moment, rules: Rules) -> Condition:
    if error.severity == Severity.IGNORE:
        return condition
    recent = [when for when in condition.errors if now.boot - when < rules.window]
    if error.counts:
        # Of a storm of errors, keep only as many as the threshold needs.
        recent += [now.boot] * min(error.times, rules.suspects)
    errors = tuple(recent[-rules.suspects :])
    own = condition.own or error.is_its_own
    known = replace(condition, errors=errors, last_error=now.boot, own=own)
    if error.severity == Severity.SUSPECT and len(errors) < rules.suspects:
        if condition.state == HealthState.RECOVERING and error.counts:
            return _bad(known, Need.PROOF, error.reason, now, rules, of=error)
        if not condition.state.is_allocatable:
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
        # A GPU that came back was reset.
        known = step(known, Reset(), now, rules)
    if answer.asks is not None and answer.asks != known.asks:
        known = replace(known, asks=answer.asks)
        if answer.asks:
            known = replace(known, last_error=now.boot)
            return _bad(known, Need.RESET, _ASKED, now, rules, remedy=answer.asks)
        known = step(known, Reset(), now, rules)
    failed, pending = answer.failed and not known.failed, answer.pending and not known.pending
    known = replace(known, failed=bool(answer.failed), pending=bool(answer.pending))
    if failed:
        known = replace(known, last_error=now.boot)
        return _bad(known, Need.RESET, answer.failed, now, rules, remedy=_OF_ROWS)
    if pending:
        known = _suspected(known, answer.pending, now, _OF_PENDING)
    if known.state == HealthState.UNHEALTHY and known.need < Need.RESET and not answer.pending:
        state = TRANSITIONS[known.state, Cause.ANSWERS]
        return replace(known, state=state, since=now.epoch, answers_since=now.boot)
    if not known.pending and now.boot >= due(known, rules):
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
            return _suspected(healthy, f"its errors are not received: {known.unwatched}", now)
        return healthy
    return known


def due(condition: Condition, rules: Rules) -> float:
    """Return when the state may change by time alone, so that the device must be sampled.

    Returns:
        Seconds since boot; infinite if time alone changes nothing.
    """
    if condition.state == HealthState.UNHEALTHY:
        return math.inf
    if condition.silent_since is not None:
        return condition.silent_since + rules.patience
    if condition.state == HealthState.RECOVERING:
        since = max(condition.answers_since, condition.last_error)
        return since + _quiet_time(condition, rules)
    if condition.state == HealthState.SUSPECT and not condition.pending and not condition.unwatched:
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
    if known.state == HealthState.UNHEALTHY:
        return known
    if now.boot - since >= rules.patience:
        return _bad(known, Need.PROOF, reason, now, rules)
    return _suspected(known, reason, now)  # a recovering device waits for an answer


def _after_clear(condition: Condition, now: Moment) -> Condition:
    if condition.lost or condition.state == HealthState.HEALTHY:
        return condition
    return replace(
        condition,
        state=TRANSITIONS[condition.state, Cause.CLEAR],
        since=now.epoch,
        reason="returned to service by hand",
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
    if state == HealthState.SUSPECT:  # the latest reason counts
        return replace(condition, reason=reason, remedy=remedy)
    if state != HealthState.HEALTHY:
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
    """Make the device unhealthy, or keep it so for a stronger reason."""
    was = condition.state
    known = replace(condition, need=max(condition.need, need))
    if was == HealthState.UNHEALTHY and need < condition.need:
        return known  # keep the reason that is harder to resolve
    if of is not None:
        # A device that fails now drops the containers that were blamed while it was suspect.
        before = condition.blamed if was == HealthState.UNHEALTHY else ()
        known = replace(known, xid=of.xid or known.xid, blamed=_with(before, of.blamed))
    elif was != HealthState.UNHEALTHY:
        known = replace(known, blamed=())
    known = replace(known, reason=reason, remedy=of.remedy if of is not None else remedy)
    if was == HealthState.UNHEALTHY:
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
