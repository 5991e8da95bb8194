"""What a container has used, as containerd asks for it.

The shim loads this module with the first question, not at its start: it takes 5 ms and 0.3 MB,
and many containers are never asked about.

Source: containerd docs/runtime-v2.md; its metrics service takes the type of either version.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING

from shim import netdev, statfiles, stats_v1, stats_v2, taskstats
from shim.cgroup import UNIFIED
from shim.errors import CgroupNotFound

if TYPE_CHECKING:
    from api.proto import cgroups_v1_pb2, cgroups_v2_pb2
    from shim.cgroup import Cgroup

# Hierarchies that the processes of a container are sure to be in; any would do.
_COUNTED: tuple[str, ...] = ("pids", "memory", "freezer", "devices", "cpu")


def read(
    cgroup: Cgroup | None, *, container_id: str, pid: int
) -> cgroups_v1_pb2.Metrics | cgroups_v2_pb2.Metrics:
    """Read the statistics of a container.

    Args:
        cgroup: the container's; None if it has none of its own.
        container_id: the container, for the error's words.
        pid: its init process, in whose network it is; 0 if that has ended.

    Returns:
        The message of the version of cgroups that has the controllers.

    Raises:
        CgroupNotFound: there is no cgroup, or not any more. What a container used before its
            cgroup was removed is known to nobody.
    """
    asked = f"statistics of {container_id}"
    if cgroup is None:
        raise CgroupNotFound(
            asked, found="no cgroup of its own", do="let the runtime make one: set cgroupsPath"
        )
    existing = {
        controller: directory
        for controller, directory in cgroup.directories.items()
        if (controller == UNIFIED) == cgroup.is_v2 and os.path.isdir(directory)
    }
    if not existing:
        raise CgroupNotFound(asked, found="its cgroup is gone", do="ask while the task runs")
    result: cgroups_v1_pb2.Metrics | cgroups_v2_pb2.Metrics
    if cgroup.is_v2:
        result = stats_v2.metrics(existing[UNIFIED])
    else:
        devices = stats_v1.block_devices(statfiles.read("/proc", "partitions") or "")
        result = stats_v1.metrics(existing, devices, ticks=os.sysconf("SC_CLK_TCK"))
        counted = next((existing[name] for name in _COUNTED if name in existing), None)
        tasks = taskstats.count_tasks(counted) if counted else None
        if tasks is not None:
            for name, value in asdict(tasks).items():
                setattr(result.cgroup_stats, name, value)
            result.cgroup_stats.SetInParent()
    for interface in netdev.interfaces_of(pid) if pid else ():
        result.network.add(**asdict(interface))
    return result
