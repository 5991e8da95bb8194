"""Merging the events of two sources, and repeated ones."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from integration.node.services.monitor.merging import HOLD, Merger
from integration.nvml.values import GpuEvent, SwitchError

GPU = "GPU-00000000-0000-0000-0000-000000000000"


def nvml(xid: int = 79, **more: Any) -> GpuEvent:
    return GpuEvent(1.0, "xid", GPU, xid=xid, **more)


def log(xid: int = 79, pid: int = 7, **more: Any) -> GpuEvent:
    return GpuEvent(2.0, "xid", GPU, xid=xid, pid=pid, process="p", source="kernel", **more)


def told(*events: tuple[float, GpuEvent], until: float = 100.0) -> list[tuple[float, GpuEvent]]:
    """Return the events and their times, for a reader that wakes exactly when one is due."""
    merger, left = Merger(), list(events)
    found: list[tuple[float, GpuEvent]] = []
    while True:
        wake = merger.wake()
        now = min(
            [*[when for when, _ in left[:1]], *([] if wake is None else [wake])], default=until
        )
        if now >= until:
            return found
        while left and left[0][0] <= now:
            merger.add(left.pop(0)[1], now)
        found += [(now, event) for event in merger.due(now)]


def test_both_halves_are_one_event_as_soon_as_they_are_there() -> None:
    for first, second in ((nvml(gpu_instance=3), log()), (log(), nvml(gpu_instance=3))):
        [(when, event)] = told((0.0, first), (0.01, second))
        assert when == 0.01
        assert (event.gpu_instance, event.pid, event.process) == (3, 7, "p")
        assert (event.source, event.when, event.times) == ("nvml", 1.0, 1)


def test_one_to_which_the_other_adds_nothing_is_told_at_once_and_once() -> None:
    merger = Merger()
    merger.add(log(), 0.0, is_whole=True)
    assert merger.due(0.0) == [log()]
    merger.add(nvml(), 0.2)
    assert merger.wake() is None
    assert merger.due(10.0) == []


def test_one_alone_is_told_after_a_moment() -> None:
    for alone in (nvml(), log()):
        assert told((0.0, alone)) == [(HOLD, alone)]


def test_the_other_half_that_comes_late_is_no_other_error() -> None:
    for first, second in ((nvml(), log()), (log(), nvml())):
        assert told((0.0, first), (2.0, second)) == [(HOLD, first)]
        assert len(told((0.0, first), (20.0, second))) == 2


def test_what_does_not_belong_together_stays_apart() -> None:
    assert len(told((0.0, nvml(31)), (0.0, log(43)))) == 2
    assert len(told((0.0, nvml(gpu_instance=1)), (0.0, log(gpu_instance=2)))) == 2
    assert len(told((0.0, log(pid=1)), (0.0, log(pid=2)))) == 2


def test_a_storm_is_told_of_once_a_second() -> None:
    storm = [(n / 1000, log(31)) for n in range(3500)]
    found = told(*storm)
    assert len(found) <= 6
    assert sum(event.times for _, event in found) == 3500
    assert found[0][0] <= HOLD


def test_a_line_that_says_that_it_is_worse_is_not_counted_to_those_before_it() -> None:
    link = "XC0 i0 Link 13 (0x0409a0c2 0x00000008 0x00000001 0x00000000 0x00100000 0x00000004)"
    change = "GPU recovery action changed from 0x0 (None) to 0x{} ({})"
    for number, texts in (
        (145, (f"RLW_RXPIPE Nonfatal {link}", f"RLW_RXPIPE Fatal {link}")),
        (154, (change.format(2, "Node Reboot Required"), change.format(0, "None"))),
    ):
        merger = Merger()
        for text in (texts[0], *texts):
            merger.add(log(number, pid=0, text=text), 0.0, is_whole=True)
        assert [(each.text, each.times) for each in merger.due(0.0)] == [
            (texts[0], 1), (texts[1], 1),
        ]  # fmt: skip
        assert [(each.text, each.times) for each in merger.due(10.0)] == [(texts[0], 1)]


def test_a_storm_of_processes_is_bounded_and_nothing_is_lost() -> None:
    storm = [(n / 1e6, log(31, pid=n + 1)) for n in range(5000)]
    found = told(*storm)
    assert len(found) < 600
    assert sum(event.times for _, event in found) == 5000


@given(
    st.lists(
        st.tuples(
            st.floats(0, 0.4), st.booleans(), st.sampled_from([31, 79]), st.sampled_from([0, 7])
        ),
        max_size=60,
    )
)
def test_whatever_comes_is_told_of_in_bounded_time(
    steps: list[tuple[float, bool, int, int]],
) -> None:
    now, events, heard = 0.0, [], {31: [0, 0], 79: [0, 0]}
    for pause, is_log, xid, pid in steps:
        now += pause
        events.append((now, log(xid, pid) if is_log else nvml(xid)))
        heard[xid][is_log] += 1
    found = told(*events, until=now + 3)
    for xid, (of_nvml, of_log) in heard.items():
        count = sum(event.times for _, event in found if event.xid == xid)
        # Each is reported once, alone or merged with its other half.
        assert max(of_nvml, of_log) <= count <= of_nvml + of_log


def test_each_error_of_a_switch_is_told_and_equal_ones_together() -> None:
    def error(severity: str, bus_id: str = "0000:c2:00.0") -> GpuEvent:
        switch = SwitchError("nvidia-nvswitch0", 20034, severity, 28)
        return GpuEvent(1.0, "sxid", "", bus_id=bus_id, switch=switch, source="kernel")

    storm = [error("non-fatal")] * 3 + [error("fatal"), error("fatal", "0000:c3:00.0")]
    found = told(*((0.0, each) for each in storm))
    assert [event for when, event in found if when == 0.0] == [storm[0], *storm[3:]]
    assert [event.times for when, event in found if when > 0.0] == [2]


def test_in_a_storm_a_fatal_error_of_a_switch_is_not_counted_to_lesser_ones() -> None:
    def error(number: int, severity: str) -> GpuEvent:
        switch = SwitchError("nvidia-nvswitch0", number, severity, 28)
        return GpuEvent(1.0, "sxid", GPU, bus_id="0000:c2:00.0", switch=switch, source="kernel")

    storm = [*(error(number, "non-fatal") for number in range(300)), error(300, "fatal")]
    found = [event for _, event in told(*((0.0, each) for each in storm))]
    assert [event for event in found if event.switch and event.switch.severity == "fatal"] == [
        storm[-1]
    ]
    assert sum(event.times for event in found) == len(storm)
