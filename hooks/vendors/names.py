"""The syntax of GPUs in AMD_VISIBLE_DEVICES, INTEL_VISIBLE_DEVICES and their CDI names.

A value is a comma-separated list; spaces around an item, empty items and case are ignored. The
first rule that matches decides:

=====================  ====================================================================
no item, or ``void``   nothing is requested
``none`` or ``all``,   ``none``: nothing; ``all``: every GPU of the vendor
whichever first
otherwise              each item is one of:
``0``                  a GPU, or a partition of one, by its index: its place in PCI bus order
``0-3``                the GPUs with indices from 0 to 3
anything else          a GPU that has this name
=====================  ====================================================================

The names of a GPU:

=======================  ==========================================================
``0000:03:00.0``         its PCI address; of domain 0 also ``03:00.0``
``0000-03-00-0-0x56a0``  the same with its device id: Intel's resource driver
``card1, renderD129``    its nodes
``0x1f2e…, 1f2e…``       AMD's unique id, as in ``rocm-smi --showuniqueid``
``GPU-1f2e…``            the same, as ROCR_VISIBLE_DEVICES and ``rocminfo`` write it
=======================  ==========================================================

The name of a partitioned GPU means all of its partitions.

Source: AMD Container Toolkit, "GPU Partitioning" and its list of GPUs; Intel's resource driver
for Kubernetes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from api.values import dataclass
from hooks.errors import MalformedVendorRange

# More digits than any node has GPUs; longer ones are unique ids.
_MOST_DIGITS = 6
# Fewer hexadecimal digits count as an index, or a misspelt one.
_FEWEST_HEX_DIGITS = 9


@dataclass(frozen=True, slots=True)
class Range:
    """Indices from ``first`` to ``last``, both included."""

    first: int
    last: int

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


Item: TypeAlias = Range | str


@dataclass(frozen=True, slots=True)
class VendorRequest:
    """A request for a vendor's GPUs."""

    items: tuple[Item, ...]  # indices and names, in lower case; empty for every GPU
    source: str  # the text of the request, for display ("AMD_VISIBLE_DEVICES=0,1")

    @property
    def everything(self) -> bool:
        """Whether every GPU is requested."""
        return not self.items


def parse(value: str, variable: str) -> VendorRequest | None:
    """Parse the request in a value, by the rules above; return None for nothing.

    Raises:
        MalformedVendorRange: a range ends before it starts.
    """
    source = f"{variable}={value}"
    items = [item for item in (part.strip().lower() for part in value.split(",")) if item]
    if not items or "void" in items:
        return None
    for item in items:
        if item == "none":
            return None
        if item == "all":
            return VendorRequest((), source)
    return VendorRequest(tuple(dict.fromkeys(_item(item, source) for item in items)), source)


def _item(item: str, source: str) -> Item:
    first, dash, last = item.partition("-")
    if _is_index(first) and not dash:
        return Range(int(first), int(first))
    if _is_index(first) and _is_index(last):
        if int(first) > int(last):
            raise MalformedVendorRange(
                source,
                found=f"{item} ends before it starts",
                do=f"write {last}-{first}",
            )
        return Range(int(first), int(last))
    return item


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS


def address_names(address: str, device_id: str) -> Iterator[str]:
    """Yield the names that a GPU has by its PCI address.

    Args:
        address: "0000:03:00.0".
        device_id: its device id in sysfs' form ("0x56a0"); "" if it has none.

    Yields:
        Names in lower case.
    """
    yield address
    if address.startswith("0000:"):
        yield address.removeprefix("0000:")
    if device_id:
        yield f"{address.replace(':', '-').replace('.', '-')}-{device_id}"


def unique_names(unique_id: int) -> Iterator[str]:
    """Yield a GPU's names by AMD's unique id; none if it is 0, as on APUs."""
    if unique_id:
        for digits in (f"{unique_id:x}", f"{unique_id:016x}"):
            yield f"0x{digits}"
            yield f"gpu-{digits}"
            if len(digits) >= _FEWEST_HEX_DIGITS:
                yield digits
