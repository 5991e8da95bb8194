"""A flame graph: who called whom from above to below, as wide as the time that it took."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.bench.svg import CHARACTER, Picture

if TYPE_CHECKING:
    from tests.bench.stacks import Node

_WIDTH: Final = 1000.0
_ROW: Final = 17.0
_TOP: Final = 44.0
_SIDE: Final = 8.0
# Narrower than that, a box is a line that says nothing.
_LEAST: Final = 2.0

# By the beginning of a file's path or a module's name: a colour, and whose code it is.
_OWNERS: Final = (
    (("shim",), "shim", "the shim"),
    (("hooks",), "hooks", "the engine"),
    (("api",), "api", "ttrpc and the loop"),
)
_OTHERS: Final = ("other", "Python's library and others")

_STYLE: Final = """\
.box text,.l{font:10.5px ui-monospace,monospace}
.l{fill:#1b1f24}rect{stroke:#fff;stroke-width:.6}
.shim{fill:#f6b26b}.hooks{fill:#93c47d}.api{fill:#8fb8e8}.other{fill:#d0d0d0}
@media(prefers-color-scheme:dark){.l{fill:#e6edf3}rect{stroke:#0d1117}
.shim{fill:#8a4b14}.hooks{fill:#2f6b2a}.api{fill:#1f4f86}.other{fill:#3d444d}}
"""


def flame_graph(tree: Node, title: str, unit: str) -> str:
    """Draw a tree.

    Args:
        tree: what took how long.
        title: what it is of.
        unit: of the tree's numbers.

    Returns:
        The SVG file's content.
    """
    whole = tree.total
    tree = tree.without_small(whole * _LEAST / (_WIDTH - 2 * _SIDE))
    picture = Picture(_WIDTH, _TOP + _ROW * tree.depth + 8, title, style=_STYLE)
    picture.text(_SIDE, 16, title, "bold")
    along = _SIDE
    for kind, owner in (*((kind, owner) for _, kind, owner in _OWNERS), _OTHERS):
        picture.box(along, 25, 11, 11, kind)
        picture.text(along + 15, 34.5, owner, "small")
        along += 30 + CHARACTER * len(owner)
    if whole:
        _draw(picture, tree, _SIDE, 0, (_WIDTH - 2 * _SIDE) / whole, unit, whole)
    return picture.render()


def owner_of(name: str) -> str:
    """Whose code a function ("run (api/aio/loop.py)") or a module ("api.aio") is."""
    place = name.rpartition("(")[2]
    for beginnings, kind, _ in _OWNERS:
        if any(place.startswith((f"{b}/", f"{b}.")) or place == b for b in beginnings):
            return kind
    return _OTHERS[0]


def _draw(
    picture: Picture, node: Node, x: float, level: int, scale: float, unit: str, whole: float
) -> None:
    width, y = node.total * scale, _TOP + _ROW * level
    hint = f"{node.name}: {node.total:.4g} {unit}, {100 * node.total / whole:.1f} %"
    picture.box(x, y, width, _ROW - 1, owner_of(node.name), hint=hint)
    fitting = int((width - 6) / CHARACTER)
    if fitting >= 3:
        name = node.name if len(node.name) <= fitting else node.name[: fitting - 1] + "…"
        picture.text(x + 3, y + 11.5, name, "l")
    for below in node.below.values():
        _draw(picture, below, x, level + 1, scale, unit, whole)
        x += below.total * scale
