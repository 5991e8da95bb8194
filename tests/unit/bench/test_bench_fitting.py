"""The power with which a cost grows is found whatever the constant below it."""

from __future__ import annotations

import pytest

from tests.bench.fitting import exponent

PLACES = (1, 8, 16, 64)


@pytest.mark.parametrize("power", [0.5, 1, 2])
@pytest.mark.parametrize("constant", [0, 140])
def test_power_of_what_grows_is_found(power: float, constant: float) -> None:
    values = [constant + 3 * (place - 1) ** power for place in PLACES]
    if constant == 0:
        values[0] = 1e-9
    assert exponent(PLACES, values) == pytest.approx(power, abs=0.01)


def test_what_does_not_grow_has_power_zero() -> None:
    assert exponent(PLACES, [140, 143, 139, 141]) == 0
    assert exponent(PLACES, [140, 120, 110, 100]) == 0


def test_two_places_say_nothing() -> None:
    assert exponent((1, 8), (1, 8)) is None


def test_values_below_the_first_are_left_out() -> None:
    assert exponent((1, 2, 3, 5), (10, 9, 12, 14)) == pytest.approx(1, abs=0.01)
    assert exponent((1, 2, 3), (10, 9, 12)) is None
