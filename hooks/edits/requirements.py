"""Check what an image requires of the driver and the GPUs: NVIDIA_REQUIRE_*.

A value is a condition: alternatives separated by spaces, each a comma-separated list of comparisons
that must all be true, such as ``cuda>=12.4 brand=tesla,driver>=535,driver<536``. If there are
several variables, all must be met, for each GPU that the container gets.

=========  ==================================  =========================
property   is                                  compared by
=========  ==================================  =========================
cuda       the newest CUDA of the driver       ``= != < <= > >=``
driver     the driver's version                the same
arch       the GPU's compute capability        the same
brand      what the GPU is sold as ("tesla")   ``= !=``, in any case
=========  ==================================  =========================

Rules
- Versions are compared number by number; "12" is "12.0".
- A condition on GPUs is met if the container gets none: ``none`` requests only the driver.
- A comparison with an unknown property is undecided. A condition that is true either way is met;
  one that depends on the comparison is an error. NVIDIA's own runtime considers it met, and a
  program then fails with a message that is harder to understand.
- Without NVML, a table gives the CUDA version of the driver's branch. A driver newer than the table
  has at least its newest version, so an old table never refuses an image.
- An expression of any other form is always an error. An empty one requires nothing.

Source: libnvidia-container, src/cli/{dsl,configure}.c; NVIDIA Container Toolkit,
internal/requirements; the CUDA toolkit's release notes, table of driver versions.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from api.values import dataclass
from hooks.edits.grant import Grant
from hooks.errors import MalformedRequirement, RequestError, RequirementUnclear, RequirementUnmet
from hooks.node.gpus import Gpu
from hooks.node.inventory import Inventory
from hooks.node.roots import cuda_of_branch, is_new_branch
from hooks.words import quotes_in


@dataclass(frozen=True, slots=True)
class Comparison:
    """A property, a comparison operator, and a value."""

    property: str
    operator: str
    value: str

    def __str__(self) -> str:
        return f"{self.property}{self.operator}{self.value}"


_OPERATORS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_OR_NEWER: Final = " or newer"
# What can be true of a version with only a known minimum. Other comparisons always can.
_POSSIBLE: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "=": operator.le,
    "<": operator.lt,
    "<=": operator.le,
}
_FORM: Final = re.compile(r"([A-Za-z]+)(=|!=|<=?|>=?)([^<>=!]+)")
# Bounds the work of int(); no version has longer numbers.
_VERSION: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9}){0,7}", re.ASCII)
_VERSIONS: Final = frozenset({"cuda", "driver", "arch"})
_TEXTS: Final = frozenset({"brand"})
_OF_GPUS: Final = frozenset({"arch", "brand"})
_LONGEST: Final = 16 << 10


def parse_requirement(variable: str, expression: str) -> tuple[tuple[Comparison, ...], ...]:
    """Parse an expression into alternatives of comparisons that must all be true.

    Raises:
        MalformedRequirement: it is not a condition.
    """
    if len(expression) > _LONGEST:
        raise _malformed(variable, expression, f"{len(expression)} characters")
    alternatives = []
    for alternative in expression.split():
        parts = [part for part in alternative.split(",") if part]
        if parts:
            alternatives.append(tuple(_comparison(part, variable, expression) for part in parts))
    return tuple(alternatives)


def _comparison(text: str, variable: str, expression: str) -> Comparison:
    match = _FORM.fullmatch(text)
    if match is None:
        raise _malformed(variable, expression, f'"{text}" compares nothing')
    name, compared, value = match[1].lower(), match[2], match[3]
    if name not in _VERSIONS | _TEXTS:
        raise _malformed(variable, expression, f'"{name}" is no property')
    if name in _VERSIONS and not _VERSION.fullmatch(value):
        raise _malformed(variable, expression, f'"{value}" is no version')
    if name in _TEXTS and compared not in {"=", "!="}:
        raise _malformed(variable, expression, f"{name} has no order")
    return Comparison(name, compared, value)


def check_requirements(
    requirements: Iterable[tuple[str, str]], grant: Grant, inventory: Inventory
) -> None:
    """Check an image's requirements against what the container gets.

    Raises:
        MalformedRequirement: an expression is not a condition.
        RequirementUnmet: a condition is not met.
        RequirementUnclear: it is unknown whether a condition is met.
    """
    parsed = [(*each, parse_requirement(*each)) for each in requirements]
    if not any(alternatives for _, _, alternatives in parsed):
        return
    version = inventory.driver.version
    driver = {"cuda": inventory.cuda_version, "driver": version}
    if is_new_branch(version) and driver["cuda"] == cuda_of_branch(version):
        driver["cuda"] += _OR_NEWER
    gpus = dict.fromkeys((*grant.gpus, *(inventory.gpus[d.gpu] for d in grant.mig_devices)))
    subjects: list[tuple[Gpu | None, dict[str, str]]] = [
        (gpu, {**driver, **_of_gpu(gpu)}) for gpu in gpus
    ] or [(None, driver)]
    for variable, expression, alternatives in parsed:
        for gpu, properties in subjects:
            met = _is_met(alternatives, properties)
            if met is None:
                raise RequirementUnclear(
                    f"image that needs {_short(variable, expression)}",
                    found=f"NVML has not said what it hangs on: {inventory.nvml_failure}"
                    if inventory.nvml_failure
                    else f"NVML does not know what it hangs on, {_unknown(properties)}",
                    do=_IGNORE_IT,
                )
            if not met:
                raise RequirementUnmet(
                    f"image that needs {_short(variable, expression)}",
                    found=_describe(gpu, properties, alternatives),
                    do=f"use an image that fits, update the driver, or {_IGNORE_IT}",
                )


def _of_gpu(gpu: Gpu) -> dict[str, str]:
    return {"arch": gpu.compute_capability, "brand": gpu.brand}


def _is_met(
    alternatives: tuple[tuple[Comparison, ...], ...], properties: Mapping[str, str]
) -> bool | None:
    """Whether a condition is met; None if that depends on an unknown property."""
    if not alternatives:
        return True
    outcomes = [_all(_holds(each, properties) for each in parts) for parts in alternatives]
    if True in outcomes:
        return True
    return None if None in outcomes else False


def _all(outcomes: Iterable[bool | None]) -> bool | None:
    each = list(outcomes)
    if False in each:
        return False
    return None if None in each else True


def _holds(comparison: Comparison, properties: Mapping[str, str]) -> bool | None:
    found = properties.get(comparison.property)
    if found is None:
        return True  # a GPU property, but the container gets no GPU
    compare = _OPERATORS[comparison.operator]
    if comparison.property in _TEXTS:
        return bool(compare(found.lower(), comparison.value.lower())) if found else None
    if found.endswith(_OR_NEWER):
        possible = _POSSIBLE.get(comparison.operator)
        least = _numbers(found.removesuffix(_OR_NEWER))
        return possible is None or bool(possible(least, _numbers(comparison.value)))
    if not _VERSION.fullmatch(found):
        return None
    return bool(compare(_numbers(found), _numbers(comparison.value)))


def _numbers(version: str) -> tuple[int, ...]:
    """Return a version as numbers, without trailing zeros: "12.0" is "12"."""
    numbers = [int(part) for part in version.split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


_NAMES: Final = {"arch": "compute capability", "brand": "brand"}
_IGNORE_IT: Final = "set NVIDIA_DISABLE_REQUIRE=true for the container"


def _describe(
    gpu: Gpu | None,
    properties: Mapping[str, str],
    alternatives: tuple[tuple[Comparison, ...], ...],
) -> str:
    cuda = properties["cuda"]
    node = f"this node's driver {properties['driver']}" + (f" supports CUDA {cuda}" if cuda else "")
    wanted = {each.property for parts in alternatives for each in parts} & _OF_GPUS
    if gpu is None or not wanted:
        return node
    known = (f"{_NAMES[name]} {properties[name] or 'unknown'}" for name in sorted(wanted))
    return f"{node}, and {gpu} has {', '.join(known)}"


def _unknown(properties: Mapping[str, str]) -> str:
    return ", ".join(name for name, value in properties.items() if not value)


_MOST_SHOWN: Final = 120


def _short(variable: str, expression: str) -> str:
    """Shorten an expression for a message: images list every branch of the driver."""
    words = expression.split()
    shown = " ".join(words)
    if len(shown) > _MOST_SHOWN:
        shown = f"{words[0][:_MOST_SHOWN]} or another of {len(words)}"
    return f"{shown} ({variable})"


def _malformed(variable: str, expression: str, found: str) -> RequestError:
    return MalformedRequirement(
        f"{variable}={expression}",
        found=f"{found}{quotes_in(expression)}",
        do='write comparisons such as "cuda>=12.4 driver>=535,brand=tesla": cuda, driver, arch, '
        "brand; a space means or, a comma means and",
    )
