"""Where time goes, as a tree: from sampled stacks, and from what ``-X importtime`` prints.

Source: the folded stacks of flamegraph.pl, which py-spy writes; python(1), -X importtime.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

# import time:       132 |        132 |   zipimport
_IMPORT: Final = re.compile(r"import time: +(\d+) \| +(\d+) \|( +)(\S+)")
_LINE_NUMBER: Final = re.compile(r":\d+\)$")


@dataclass(slots=True)
class Node:
    """A function or a module, and what it called or imported.

    Attributes:
        name: of it.
        own: what it took itself, in whatever unit.
        below: the others, by their names.
    """

    name: str
    own: float = 0
    below: dict[str, Node] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """What it took with all below it."""
        return self.own + sum(node.total for node in self.below.values())

    @property
    def depth(self) -> int:
        """How many are on top of one another, this one with them."""
        return 1 + max((node.depth for node in self.below.values()), default=0)

    def child(self, name: str) -> Node:
        """The one of that name below it, which is made if it is not there."""
        return self.below.setdefault(name, Node(name))

    def without_small(self, least: float) -> Node:
        """The same without what took less than ``least``; that is counted where it was called."""
        kept = {name: node for name, node in self.below.items() if node.total >= least}
        own = self.total - sum(node.total for node in kept.values())
        below = {name: node.without_small(least) for name, node in kept.items()}
        return Node(self.name, own, below)

    def from_fork(self, name: str) -> Node:
        """The part below the first function of that name; all of it if there is none."""
        pending = [self]
        while pending:
            node = pending.pop(0)
            if node.name.startswith(name):
                return Node(node.name, node.own, node.below)
            pending += node.below.values()
        return self


def from_folded(lines: Iterable[str], root: str) -> Node:
    """The tree of sampled stacks, in which the lines of a function are one.

    Args:
        lines: each a stack, outermost first, with semicolons between, and a number of samples.
        root: the name of all of it.
    """
    tree = Node(root)
    for line in lines:
        stack, _, samples = line.rstrip("\n").rpartition(" ")
        node = tree
        for frame in stack.split(";"):
            node = node.child(_LINE_NUMBER.sub(")", frame))
        node.own += int(samples)
    return tree


def from_importtime(text: str, root: str) -> Node:
    """The tree of imports, in milliseconds.

    A module is printed when its import ends, after those that it imported itself, which stand
    two columns further to the right.
    """
    tree = Node(root)
    waiting: list[tuple[int, Node]] = []
    for match in _IMPORT.finditer(text):
        own, _, indent, name = match.groups()
        node = Node(name, int(own) / 1000)
        while waiting and waiting[-1][0] > len(indent):
            child = waiting.pop()[1]
            node.below[child.name] = child
        node.below = dict(reversed(node.below.items()))
        waiting.append((len(indent), node))
    tree.below = {node.name: node for _, node in waiting}
    return tree


def by_package(tree: Node) -> dict[str, tuple[int, float]]:
    """How many modules each top-level package has in a tree of imports, and their own time.

    Returns:
        Both by the package's name, the most expensive first.
    """
    found: dict[str, tuple[int, float]] = {}
    pending = list(tree.below.values())
    while pending:
        node = pending.pop()
        package = node.name.partition(".")[0]
        count, own = found.get(package, (0, 0.0))
        found[package] = count + 1, own + node.own
        pending += node.below.values()
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))
