"""A container's cgroup, on version 1, version 2 or both.

:mod:`shim.cgroup.cgroup` finds it, :mod:`shim.cgroup.stats` reads its usage, :mod:`shim.cgroup.oom`
detects when it runs out of memory, and :mod:`shim.cgroup.resources` checks new limits.
"""
