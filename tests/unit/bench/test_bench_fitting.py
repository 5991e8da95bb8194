"""The fit finds the exponent of a cost's growth, whatever its constant part is."""

from __future__ import annotations

import pytest

from tests.bench.fitting import exponent

PLACES = (0, 8, 16, 64)


@pytest.mark.parametrize("power", [0.5, 1, 2, 3])
@pytest.mark.parametrize("constant", [0, 140])
def test_power_of_what_grows_is_found(power: float, constant: float) -> None:
    assert exponent(PLACES, [constant + 8 * place**power for place in PLACES]) == power


def test_noise_does_not_make_a_line_a_parabola() -> None:
    assert exponent(PLACES, [140, 158, 170, 260]) == pytest.approx(1, abs=0.15)


def test_what_does_not_grow_has_power_zero() -> None:
    assert exponent(PLACES, [140, 143, 139, 141]) == 0
    assert exponent(PLACES, [140, 120, 110, 100]) == 0


def test_two_places_say_nothing() -> None:
    assert exponent((1, 8), (1, 8)) is None
