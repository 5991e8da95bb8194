"""Names of MIG profiles: ``3g.40gb``, ``1c.3g.40gb``, ``1g.10gb+me``, ``1g.10gb-me``.

``3g.40gb`` is a GPU instance of three slices with one compute instance that fills it;
``1c.3g.40gb`` is a compute instance of one slice in such a GPU instance.

Source: NVIDIA's MIG user guide; NVIDIA/go-nvlib (the grammar of attributes).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final, Self

_ATTRIBUTE: Final = r"[a-z](?:[a-z0-9.]*[a-z0-9])?"
_NAME: Final = re.compile(
    r"(?:([1-9]\d{0,2})c\.)?([1-9]\d{0,2})g\.([1-9]\d{0,4})gb"
    rf"(?:([+-])({_ATTRIBUTE}(?:,{_ATTRIBUTE})*))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True, order=True)
class ProfileName:
    """The name of a profile."""

    slices: int  # of the GPU instance
    computes: int  # of them, those of the compute instance
    memory: int  # GB
    attributes: tuple[str, ...] = ()  # sorted, each with its sign: ("+me",)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse a text as the name of a profile; None if it is not one."""
        found = _NAME.fullmatch(text)
        if found is None:
            return None
        slices, attributes = int(found[2]), (found[5] or "").split(",")
        if int(found[1] or slices) > slices or len(set(attributes)) < len(attributes):
            return None
        signed = tuple(sorted(f"{found[4]}{each}" for each in attributes if each))
        return cls(slices, int(found[1] or slices), int(found[3]), signed)

    @property
    def whole(self) -> Self:
        """The name of its GPU instance."""
        return replace(self, computes=self.slices)

    def __str__(self) -> str:
        part = "" if self.computes == self.slices else f"{self.computes}c."
        sign = self.attributes[0][0] if self.attributes else ""
        attributes = sign + ",".join(each[1:] for each in self.attributes)
        return f"{part}{self.slices}g.{self.memory}gb{attributes}"
