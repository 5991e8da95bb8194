"""Reloading the device plugin's settings when they change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from hooks.config import Config
from integration.node.options import Options
from integration.node.service import Context
from integration.node.services.plugin.reloading import keep_settings
from integration.node.settings.config_choice import Choice
from integration.node.settings.source import Source
from integration.node.settings.table import Override
from integration.node.values.resources import Mig, Settings
from integration.timeouts import PATIENCE
from tests.harness.node_state import publish
from tests.harness.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio

LIMIT = 15 * PATIENCE


class Keeping:
    """The published settings and faults while the service runs."""

    def __init__(self, source: Source | None) -> None:
        self.faults: dict[str, str] = {}
        self.said: list[str] = []
        self.context = Context(Config(), Options("", 60, settings=source), self.say)

    def say(self, level: str, event: str, **fields: Any) -> None:
        self.said.append(f"{level} {event} {fields}")

    def fault(self, concern: str, line: str) -> None:
        self.faults[concern] = line

    def strategy(self) -> Mig | None:
        settings = self.context.state.settings.value
        return settings.mig_strategy if settings is not None else None


def config_map(directory: Path, version: int, **files: str) -> None:
    """Write files as the kubelet does: one link replaces all of them."""
    data = directory / f"..{version}"
    data.mkdir()
    for name, text in files.items():
        (data / name).write_text(text)
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(f"..data/{name}")
    (directory / "..data_tmp").symlink_to(data.name)
    (directory / "..data_tmp").rename(directory / "..data")


async def test_a_config_map_that_changes_is_read_again(tmp_path: Path) -> None:
    config_map(tmp_path, 1, config="flags: {migStrategy: single}")
    keeping = Keeping(Source(file=str(tmp_path / "config")))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_settings, keeping.context, keeping.fault)
        await until(lambda: keeping.strategy() is Mig.SINGLE)
        config_map(tmp_path, 2, config="flags: {migStrategy: mixed}")
        await until(lambda: keeping.strategy() is Mig.MIXED)
        config_map(tmp_path, 3, config="flags: {migStrategy: both}")
        await until(lambda: "'both'" in keeping.faults["settings"])
        assert keeping.strategy() is Mig.MIXED
        assert "stay in force" in keeping.faults["settings"]
        config_map(tmp_path, 4, config="flags: {migStrategy: none}")
        await until(lambda: keeping.strategy() is Mig.NONE)
        assert keeping.faults["settings"] == ""
        tasks.cancel_scope.cancel()


async def test_another_name_chooses_another_configuration(tmp_path: Path) -> None:
    configs, name = tmp_path / "configs", tmp_path / "labels" / "name"
    configs.mkdir()
    name.parent.mkdir()
    config_map(configs, 1, a="flags: {migStrategy: single}", b="flags: {migStrategy: mixed}")
    keeping = Keeping(Source(choice=Choice(str(configs), str(name), default="a")))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_settings, keeping.context, keeping.fault)
        await until(lambda: keeping.strategy() is Mig.SINGLE)
        name.write_text("b\n")
        await until(lambda: keeping.strategy() is Mig.MIXED)
        tasks.cancel_scope.cancel()


async def test_a_hangup_has_them_read_again() -> None:
    loads: list[int] = []

    class Counted(Source):
        def load(self) -> Settings:
            loads.append(1)
            return super().load()

    source = Counted([Override("flags.migStrategy", "--mig-strategy", ("mixed",))])
    keeping = Keeping(source)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_settings, keeping.context, keeping.fault)
        await until(lambda: keeping.strategy() is Mig.MIXED)
        for _ in range(2):
            before = len(loads)
            state = keeping.context.state
            publish(state.reloads, state.reloads.value + 1)
            await until(lambda before=before: len(loads) > before)  # type: ignore[misc]
        tasks.cancel_scope.cancel()


async def test_without_a_source_the_defaults_hold() -> None:
    keeping = Keeping(None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_settings, keeping.context, keeping.fault)
        await until(lambda: keeping.context.state.settings.value == Settings())
        tasks.cancel_scope.cancel()
