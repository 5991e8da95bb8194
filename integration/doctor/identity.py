"""Describe the examined node: GPUs, driver, engine, handlers and installed shim.

A pure function of facts. It reports no faults, and also works for a node without a GPU, an engine
or an installation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from integration.doctor.facts import Node, Unseen
from integration.doctor.findings import listed
from shim import VERSION

NEEDED: Final = ("driver", "containerd", "docker", "installation")
"""The facts that it needs."""


def identity_of(node: Node) -> dict[str, Any]:
    """Return the description as JSON values; the keys are an interface."""
    return {**_driver(node), **_engine(node), "version": VERSION, "installed": _installed(node)}


def _driver(node: Node) -> dict[str, Any]:
    driver = node.driver
    if isinstance(driver, Unseen):
        return {"gpus": [], "driver": None, "driver_fault": f"could not look: {driver.why}"}
    return {
        "gpus": [{"index": g.index, "uuid": g.uuid, "model": g.model} for g in driver.gpus],
        "driver": driver.version or driver.module,
        "driver_fault": driver.fault or None,
    }


def _engine(node: Node) -> dict[str, Any]:
    containerd, docker = node.containerd, node.docker
    found: dict[str, Any] = {
        "engine": None, "engine_version": None, "handlers": [], "found_by_name": None,
        "engine_fault": None,
    }  # fmt: skip
    if isinstance(containerd, Unseen):
        found["engine_fault"] = f"could not look: {containerd.why}"
    elif containerd is not None:
        found["engine"], found["engine_version"] = "containerd", containerd.version or None
        found["handlers"] = [handler.name for handler in containerd.handlers if handler.is_ours]
        found["found_by_name"] = containerd.by_name or None
    if docker is not None and not isinstance(docker, Unseen):
        ours = [each.name for each in docker.runtimes if each.is_ours]
        found["engine"] = found["engine"] or "docker"
        found["handlers"] += [name for name in ours if name not in found["handlers"]]
    return found


def _installed(node: Node) -> str | None:
    installation = node.installation
    if isinstance(installation, Unseen) or not installation.current:
        return None
    return f"{installation.prefix.rstrip('/')}/{installation.current}"


def identity_lines(identity: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the three lines at the head of a report, each with its title.

    Args:
        identity: the result of :func:`identity_of`.
    """
    return [("GPUs", _gpus(identity)), ("engine", _runs(identity)), ("nvshim", _own(identity))]


def _gpus(identity: Mapping[str, Any]) -> str:
    models = Counter(gpu["model"] or "of an unknown model" for gpu in identity["gpus"])
    found = listed(f"{count} x {model}" for model, count in models.items()) or "none"
    driver = f"driver {identity['driver']}" if identity["driver"] else "no driver"
    return f"{found}; {driver}"


def _runs(identity: Mapping[str, Any]) -> str:
    if identity["engine"] is None:
        return identity["engine_fault"] or "none found"
    version = f" {identity['engine_version']}" if identity["engine_version"] else ""
    handlers = listed(identity["handlers"])
    if handlers:
        text = f"handler {handlers}"
    else:
        text = "no handler; finds the shim by name" if identity["found_by_name"] else "no handler"
    return f"{identity['engine']}{version}; {text}"


def _own(identity: Mapping[str, Any]) -> str:
    return f"{identity['version']}; {identity['installed'] or 'not installed'}"
