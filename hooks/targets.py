"""Where the files of a container go: into its rootfs, or into a layer that already has them.

The engine plans, checks and places through one target, of any kind. So a prepared layer
(:mod:`hooks.prepared`) is a cache behind planning and placing.

=====================  =================================  ======================================
target                 plan                               place
=====================  =================================  ======================================
:class:`RootfsTarget`  reads the image, and plans for it  writes into the rootfs, or into
                                                          staging if that is not writable
:class:`LayerTarget`   returns the plan that was kept     writes into staging what is private to
                       with the layer                     the container
:class:`UnseenTarget`  plans for an image that cannot     writes into staging
                       be read yet
=====================  =================================  ======================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Self, TypeAlias

from api.values import dataclass
from hooks.contributions import Case, contribute
from hooks.edits.compat import Compat
from hooks.edits.grant import Grant
from hooks.edits.planning import arches_of
from hooks.image.layout import Layout, read_layout, staged_layout, unseen_layout
from hooks.image.placement import Placed, place, place_unseen, stage
from hooks.image.rootfs import Rootfs
from hooks.plan import Bounds, Contribution, Plan, united
from hooks.prepared import Prepared

NOWHERE: Final = "/dev/null"
"""A path below which no node has files."""

Lap: TypeAlias = Callable[[str], None]  # called with the name of each completed step


@dataclass(frozen=True, slots=True)
class Planned:
    """What a container with a grant gets in its image."""

    layout: Layout
    compat: Compat
    contributions: tuple[Contribution, ...]  # the parts of the plan
    plan: Plan  # the edits, including those of a prepared layer's files
    placed: Placed  # what was already placed: the files of a prepared layer


class RootfsTarget:
    """The mounted rootfs of a container without processes.

    Args:
        rootfs: the path of the rootfs; None if it cannot be read. Library directories are then a
            guess, and nothing can be placed.
        staging: a directory in this container's bundle for files that it mounts. It need not exist.
            Containers do not share it, because a container that may mount can write into it.
    """

    is_layer = False

    def __init__(self, rootfs: str | None, staging: str) -> None:
        self._rootfs = rootfs
        self.rootfs = rootfs or NOWHERE
        self.staging = staging
        self.image: Rootfs | None = None

    def __enter__(self) -> Self:
        if self._rootfs is not None:
            self.image = Rootfs.open(self._rootfs)
        return self

    def __exit__(self, *_: object) -> None:
        if self.image is not None:
            self.image.close()

    def plan(self, case: Case, grant: Grant | None, lap: Lap) -> Planned:
        """Plan what every source contributes, for the image of ``case``."""
        return plan_for_image(case, grant, lap)

    def place(self, case: Case, planned: Planned) -> Placed:
        """Write the files of a plan; undo all of it on failure.

        Raises:
            RootfsError: a file cannot be written; the image is unchanged.
        """
        if case.image is None:
            message = "nothing can be placed without an image"
            raise AssertionError(message)
        return place(case.image, planned.plan, planned.layout, self.staging, case.variables())


class LayerTarget:
    """A layer of the image that contains the container's files.

    Args:
        prepared: the plan and files of the layer, which has the same key.
        rootfs: the path of the container's rootfs.
        staging: as for :class:`RootfsTarget`.
    """

    is_layer = True
    image: Rootfs | None = None  # neither read nor written

    def __init__(self, prepared: Prepared, rootfs: str, staging: str) -> None:
        self._prepared = prepared
        self.rootfs = rootfs
        self.staging = staging

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def plan(self, case: Case, _grant: Grant | None, _lap: Lap) -> Planned:
        """Return the plan for the image, and what its layer contains."""
        prepared, inventory = self._prepared, case.inventory
        if inventory is None:
            message = "a layer has a key only with an inventory"
            raise AssertionError(message)
        placed = prepared.placed.at(prepared.plan, self.staging)
        plan = placed.added_to(prepared.plan)
        bounds = Bounds(inventory.nodes.majors, (*inventory.sources, self.staging))
        contributions = (Contribution(plan, bounds),)
        return Planned(prepared.layout, prepared.compat, contributions, plan, placed)

    def place(self, _case: Case, planned: Planned) -> Placed:
        """Write into staging what is specific to each container.

        Raises:
            RootfsError: a file cannot be written; everything was undone.
        """
        stage(planned.placed, planned.plan, self.staging)
        return planned.placed


class UnseenTarget:
    """A rootfs that is not mounted yet, so it is neither read nor written.

    Args:
        staging: as for :class:`RootfsTarget`.
    """

    is_layer = False
    image: Rootfs | None = None
    rootfs = NOWHERE

    def __init__(self, staging: str) -> None:
        self.staging = staging

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def plan(self, case: Case, grant: Grant | None, lap: Lap) -> Planned:
        """Plan what every source contributes, with the libraries on a tmpfs in the container."""
        layout = staged_layout(arches_of(grant, case.inventory), case.mounts())
        lap("layout")
        return _planned(case, grant, layout)

    def place(self, case: Case, planned: Planned) -> Placed:
        """Write the files of a plan into staging.

        Raises:
            RootfsError: a file cannot be written; everything was undone.
        """
        return place_unseen(planned.plan, planned.layout, self.staging, case.variables())


Target: TypeAlias = RootfsTarget | LayerTarget | UnseenTarget


def plan_for_image(case: Case, grant: Grant | None, lap: Lap) -> Planned:
    """Plan what every source contributes, for the image of ``case``.

    Raises:
        NvshimError: the request cannot be met.
    """
    arches = arches_of(grant, case.inventory)
    if case.image is None:
        layout = unseen_layout(arches)
    else:
        layout = read_layout(case.image, arches, spec_mounts=case.mounts())
    lap("layout")
    return _planned(case, grant, layout)


def _planned(case: Case, grant: Grant | None, layout: Layout) -> Planned:
    contributions, compat = contribute(case, grant, layout)
    plan = united(each.plan for each in contributions)
    return Planned(layout, compat, contributions, plan, Placed())
