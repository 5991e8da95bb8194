"""containerd-shim-nvidia: a containerd shim (runtime v2) that gives containers their GPUs.

The packages, and the task of each:

- :mod:`shim.verbs`: the short-lived programs that containerd runs: start, delete, -info, -v.
- :mod:`shim.forkserver`: how a shim process is created.
- :mod:`shim.pod`: the supervisor, one process per pod, which serves the Task API.
- :mod:`shim.work`: the part of Create for containers that request GPUs.
- :mod:`shim.runtime`: runc and crun.
- :mod:`shim.rootfs`: the mounts of a container's root file system.
- :mod:`shim.stdio`: fifos, terminals, log files and loggers.
- :mod:`shim.cgroup`: usage, limits, memory events.
- :mod:`shim.checkpoint`, :mod:`shim.sandbox`: features that few pods use.

All rooms share the modules next to them: the files of a bundle, system calls, spawning and reaping,
sockets, the log, errors.
"""

__all__ = ["PROGRAM", "RUNTIME_NAME", "VERSION"]

# containerd's name of the runtime. The program is named after its last two parts.
RUNTIME_NAME = "io.containerd.nvidia.v1"

# The program that containerd executes, and the name of all our processes in ps.
PROGRAM = "containerd-shim-nvidia-v1"

# Also in pyproject.toml: reading a distribution's metadata takes longer than a whole verb.
VERSION = "0.2.0"
