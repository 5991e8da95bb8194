"""containerd-shim-nvidia: a containerd shim (runtime v2) that gives containers their GPUs.

The program has two lives, and the modules belong to one or the other.

The **verbs** are run by containerd for a moment each, and it waits for them. They import the
interpreter's cheapest modules only; ``tests/unit/verbs`` names which:

- :mod:`shim.verbs`: which verb, and what happens when one fails.
- :mod:`shim.invocation`: the flags.
- :mod:`shim.start`, :mod:`shim.delete`, :mod:`shim.info`: the verbs themselves.
- :mod:`shim.wire`: the few protobuf messages that they read and write.
- :mod:`shim.address`, :mod:`shim.sockets`: where a shim is reached.
- :mod:`shim.handleroptions`: what of a handler's options the verbs need.
- :mod:`shim.remains`, :mod:`shim.foreground`: ending what a dead shim left running.
- :mod:`shim.mountinfo`, :mod:`shim.mounts`: what is mounted in a bundle.
- :mod:`shim.launcher`: writes the program that containerd executes.

The **server** (:mod:`shim.server`) is what ``start`` forks, by way of :mod:`shim.detach`. It
lives as long as the pod, and may import protobuf. It runs on :mod:`api.aio`.

Both share :mod:`shim.bundle` (the files they leave for each other), :mod:`shim.errors` and
:mod:`shim.syscalls`.
"""

__all__ = ["RUNTIME_NAME", "VERSION"]

# What containerd calls the runtime. Its last two parts make the name of the program.
RUNTIME_NAME = "io.containerd.nvidia.v1"

# Also in pyproject.toml: reading a distribution's metadata costs more than a whole verb.
VERSION = "0.1.0"
