"""containerd-shim-nvidia: a containerd shim (runtime v2) that gives containers their GPUs.

The packages, and the task of each:

- :mod:`shim.verbs`: the programs that containerd runs for a moment: start, delete, -info, -v.
- :mod:`shim.forkserver`: how a shim process is created.
- :mod:`shim.pod`: the supervisor, one process per pod, which serves the Task API.
- :mod:`shim.work`: what Create does for a container that asks for GPUs.
- :mod:`shim.runtime`: runc and crun.
- :mod:`shim.rootfs`: the mounts of a container's root file system.
- :mod:`shim.stdio`: fifos, terminals, log files and loggers.
- :mod:`shim.cgroup`: usage, limits, memory events.
- :mod:`shim.checkpoint`, :mod:`shim.sandbox`: features that few pods use.

The modules next to them are the ground floor that all rooms share: the files of a bundle, system
calls, spawning and reaping, sockets, the log, errors.
"""

__all__ = ["PROGRAM", "RUNTIME_NAME", "VERSION"]

# What containerd calls the runtime. Its last two parts make the name of the program.
RUNTIME_NAME = "io.containerd.nvidia.v1"

# The program that containerd executes, and what ps shows of every process of ours.
PROGRAM = "containerd-shim-nvidia-v1"

# Also in pyproject.toml: reading a distribution's metadata costs more than a whole verb.
VERSION = "0.2.0"
