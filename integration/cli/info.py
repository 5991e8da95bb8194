"""``nvshim info``: describe this node and what is installed on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from api.errors import printable
from hooks.config import Config
from integration.cli.install import with_place
from integration.cli.options import configured, with_output
from integration.cli.output import Output, plain, width_of
from integration.cli.tables import headed
from integration.inspection.node import describe_node
from integration.install.status import status
from integration.install_layout import InstallLayout

_WIDTH = 14


@click.command("info")
@with_output
@configured
@with_place
@click.option(
    "--nvml/--no-nvml", default=True, show_default=True,
    help="Query NVML if no inventory is stored.",
)  # fmt: skip
def command(output: Output, config: Config, *, layout: InstallLayout, nvml: bool) -> None:
    """Show the driver and where it was found, its devices and modules, and what is installed.

    A section with a problem also shows the remedy.
    """
    found = describe_node(config, nvml=nvml)
    found["installation"] = status(layout)
    lines: list[str] = []
    for title, rows in _sections(found):
        for number, row in enumerate(rows):
            head = f"{'' if number else title:<{_WIDTH}} "
            lines += headed(head, printable(row), width_of(output.stream))
    output.text("\n".join(lines), found)


def _sections(found: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    own = found["nvshim"]
    revision = f" ({own['revision']})" if own["revision"] else ""
    yield "nvshim", [f"{own['version']}{revision} in {own['path']}, Python {own['python']}"]
    config = found["configuration"]
    yield "configuration", [config["file"] or "no file, only the defaults", *config["notes"]]
    yield "platform", [found["platform"]]
    driver = found["driver"]
    if driver is not None:
        yield (
            "driver",
            [
                f"{driver['version']}, CUDA {plain(driver['cuda'])}, for {driver['architecture']}",
                f"in {driver['root']}, laid out as {driver['layout']}; {driver['why']}",
                f"{driver['libraries']} libraries in {', '.join(driver['library_directories'])}",
                *driver["notes"],
            ],
        )
    if found["driver_error"] is not None:
        yield "driver", [found["driver_error"]["message"]]
    yield "roots", [_root(root) for root in found["roots"]]
    inventory = found["inventory"]
    if inventory is not None:
        yield "inventory", list(_freshness(inventory))
    if found["layers"] is not None:
        yield "layers", list(_layers(found["layers"]))
    yield (
        "modules",
        [
            f"{module['name']:<17} {module['version'] or 'loaded'}"
            for module in found["modules"]
            if module["loaded"]
        ]
        or ["none is loaded"],
    )
    yield "devices", [_device(device) for device in found["devices"]]
    yield "gpus", [_gpu(row) for row in found["gpus"]]
    yield "installed", list(_installed(found["installation"]))


def _installed(answer: Mapping[str, Any]) -> Iterator[str]:
    for version in answer["versions"]:
        role = f", {version['role']}" if version["role"] else ""
        yield f"{version['name']}{role}; shims: {version['shims']}"
    if answer["being_changed"]:
        yield "an installation is running now"
    yield from answer["problems"]


def _root(root: Mapping[str, Any]) -> str:
    versions = ", ".join(root["versions"]) or "nothing"
    others = "; users other than root can write there" if root["not_roots_alone"] else ""
    chosen = "  ← chosen" if root["chosen"] else ""
    return f"{root['root']} as {root['layout']}: {versions}{others}{chosen}"


def _freshness(inventory: Mapping[str, Any]) -> Iterator[str]:
    yield f"by {inventory['source']}, taken {inventory['taken']} ({inventory['age_seconds']:.0f} s)"
    if inventory["nvml"]:
        yield f"without NVML: {inventory['nvml']}"
    key = inventory["key"]
    fresh = "fresh"
    if inventory["stale"]:
        fresh = f"stale: {inventory['stale']}" if inventory["kept"] else inventory["stale"]
    details = f", {key['observations']} observations of boot {key['boot_id']}" if key else ""
    yield f"{inventory['file']}: {fresh}{details}"
    yield from (f"note: {note}" for note in inventory["notes"])


def _layers(layers: Mapping[str, Any]) -> Iterator[str]:
    megabytes = {name: f"{layers[name] / 1e6:.1f} MB" for name in layers if name.endswith("bytes")}
    yield f"{layers['layers']} in {layers['directory']}"
    if layers["driver_layer"]:
        yield (
            f"the driver's files: {megabytes['linked_bytes']} shared with the host, "
            f"{megabytes['copied_bytes']} copied; other files: {megabytes['other_bytes']}"
        )
    else:
        yield "the driver's files are mounted: driver-layer = false"


def _device(device: Mapping[str, Any]) -> str:
    if device["fault"]:
        return f"{device['path']:<34} {device['fault']}"
    numbers = f"{device['major']}:{device['minor']}"
    return f"{device['path']:<34} {numbers:<10} {device['mode']}"


def _gpu(row: Mapping[str, Any]) -> str:
    if row["kind"] == "mig":
        index = f"{row['index']}:{row['mig_index']}"
        return f"  MIG {index} {plain(row['profile'])}, {row['uuid']}"
    mig = ", MIG mode" if row["mig_mode"] else ""
    fault = f"; {row['fault']}" if row["fault"] else ""
    return f"GPU {row['index']} {row['name']}, {plain(row['uuid'])}, at {row['pci']}{mig}{fault}"
