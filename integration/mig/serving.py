"""The commands: apply, assert, diff, export and list layouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hooks.config import Config
from integration.drain.holders import Holder
from integration.drain.serving import DrainOptions, Say
from integration.drain.waiting import blocking
from integration.mig.apply import apply, holders_of, undone
from integration.mig.errors import LayoutDiffers, LayoutImpossible
from integration.mig.format import choose, read_layouts
from integration.mig.plan import Change, concerns, differences, plan
from integration.mig.state import Cut, MigGpu, exported, read_gpus
from integration.nvml.inventory import look_at_node

__all__ = ["apply_layout", "assert_layout", "compare", "export", "list_layouts"]


def apply_layout(
    config: Config, path: str, name: str | None, options: DrainOptions, say: Say, *, dry_run: bool
) -> dict[str, Any]:
    """Apply a layout from a file.

    Args:
        name: the layout's name; None if the file has only one.
        options: whether and how to wait for holders.
        say: receives a line before each step.
        dry_run: change nothing, and list the holders of what would be destroyed.

    Returns:
        What was changed, or would be; the keys are an interface.

    Raises:
        MigError: the file or the layout cannot be used, or :func:`integration.mig.apply.apply`
            failed.
    """
    layout = choose(read_layouts(path), name, path)
    holders: tuple[Holder, ...] = ()
    if dry_run:
        inventory = look_at_node(config)
        changes = plan(layout, undone(config, read_gpus(config, inventory)))
        found = holders_of(changes, inventory, config, options) if changes else ()
        holders = blocking(found, lets_go=False)
    else:
        changes = apply(config, layout, options, say)
    return {
        "layout": layout.name,
        "gpus": _documents(changes),
        "holders": [each.to_json() for each in holders],
        "applied": not dry_run,
    }


def compare(config: Config, path: str, name: str | None) -> dict[str, Any]:
    """Return what a layout would change; the keys are an interface."""
    layout = choose(read_layouts(path), name, path)
    changes = plan(layout, undone(config, _gpus(config)))
    return {"layout": layout.name, "gpus": _documents(changes)}


def assert_layout(config: Config, path: str, name: str | None) -> None:
    """Check that the node's GPUs match a layout.

    Raises:
        LayoutDiffers: a GPU does not match, or the layout has no entry for it.
    """
    layout = choose(read_layouts(path), name, path)
    if found := list(differences(layout, _gpus(config))):
        raise LayoutDiffers(f"the layout {layout.name}", found=", ".join(found))


def export(config: Config, label: str) -> dict[str, Any]:
    """Return the present state as a file's content, with one layout of that name."""
    return exported(_gpus(config), label)


def list_layouts(config: Config, path: str) -> Iterator[dict[str, Any]]:
    """Yield a file's layouts, and whether the GPUs match or can; the keys are an interface."""
    layouts = read_layouts(path)
    gpus = _gpus(config)
    for layout in layouts.values():
        state, why = "applied", None
        try:
            if plan(layout, gpus):
                state = "possible"
            elif not concerns(layout, gpus):
                state, why = "impossible", "it has no entry for a GPU of this node"
        except LayoutImpossible as error:
            state, why = "impossible", error.sentence
        yield {"name": layout.name, "state": state, "why": why}


def _gpus(config: Config) -> tuple[MigGpu, ...]:
    return read_gpus(config, look_at_node(config))


def _documents(changes: Sequence[Change]) -> list[dict[str, Any]]:
    return [
        {
            "gpu": each.gpu.gpu.index,
            "uuid": each.uuid,
            "mig_mode": each.after.mode,
            "switches": each.switches,
            "destroyed": _instances(each.gpu, each.removed),
            "created": _instances(each.gpu, each.made),
            "kept": _instances(each.gpu, sorted(each.gpu.now.cuts & each.after.cuts)),
        }
        for each in changes
    ]


def _instances(gpu: MigGpu, cuts: Iterable[Cut]) -> list[dict[str, Any]]:
    return [
        {
            "profile": str(gpu.name_of(cut) or cut.profile),
            "start": cut.start,
            "devices": sorted(map(str, gpu.names([cut]).elements())),
        }
        for cut in cuts
    ]
