"""Blind, seeded mutations of inputs.

libFuzzer is better because coverage guides it, but this is fast and runs everywhere. The tests use
it, and ``make fuzz`` falls back to it where atheris cannot be installed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Final

_INTERESTING: Final = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 62)


def mutants(seeds: Sequence[bytes], words: Sequence[bytes], seed: int) -> Iterator[bytes]:
    """Yield inputs without end.

    Args:
        seeds: the inputs to mutate; at least one.
        words: tokens of the format, inserted at random places.
    """
    dice = random.Random(seed)
    while True:
        data = bytearray(dice.choice(seeds))
        for _ in range(dice.choice((1, 1, 2, 4, 8))):
            _change(data, dice, seeds, words)
        yield bytes(data)


def _change(
    data: bytearray, dice: random.Random, seeds: Sequence[bytes], words: Sequence[bytes]
) -> None:
    where = dice.randrange(len(data) + 1)
    until = min(len(data), where + dice.choice((1, 2, 4, 16, 256)))
    match dice.randrange(8):
        case 0 if data:
            data[where % len(data)] ^= 1 << dice.randrange(8)
        case 1:
            data[where:until] = dice.randbytes(until - where)
        case 2:
            size = dice.choice((1, 2, 4, 8))
            number = dice.choice(_INTERESTING) & (1 << 8 * size) - 1
            data[where : where + size] = number.to_bytes(size, "little")
        case 3:
            del data[where:until]
        case 4 if words:
            data[where:where] = dice.choice(words)
        case 5 if words:
            data[where:until] = dice.choice(words)
        case 6:
            other = dice.choice(seeds)
            start = dice.randrange(len(other) + 1)
            data[where:until] = other[start : start + dice.choice((4, 16, 64, 1024))]
        case _:
            data[where:where] = data[where:until] * dice.choice((1, 2, 16, 200))
