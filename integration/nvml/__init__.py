"""Query NVML in child processes: NVML may hang, so this process never loads it.

Other rooms import from here:

- :mod:`.inventory`: the node's GPUs (``inventory_of``, ``look_at_node``)
- :mod:`.query`: one question (``ask_nvml``, ``probe``)
- :mod:`.sampler`: samples, at most one question at a time (``NvmlSampler``, ``sampling``)
- :mod:`.session`: a child that streams events (``Children``, ``library_of``)
- :mod:`.mig_parts`: MIG profiles, instances and devices (``ask_parts``)
- :mod:`.topology`: PCIe paths and NVLinks between GPUs (``Topologies``)
- :mod:`.nvidia_smi`: nvidia-smi, for what NVML has no function for (``run_nvidia_smi``)
- :mod:`.lock`: keep NVML closed during a reset or a switch of MIG mode (``exclusive``)
- :mod:`.process`: fork children from a warm server, as the agent does (``fork_server``)
- :mod:`.values`, :mod:`.snapshot`, :mod:`.errors`

How it works::

    inventory ─▶ query ───┐                               ┌─▶ child_query     one answer
                          ├─▶ process ─▶ fork_server ─▶ child ─▶ child_samples   one answer per line
    sampler ─▶ session ───┘   (lock)                      └─▶ child_events    a stream

``process`` starts, watches and kills every child, and takes the lock for it. ``child`` is the main
program of all of them. In the agent, the fork server has already imported pynvml and forks; a
command starts its child directly.

If nothing asks NVML, a node has one child, which waits for events. Events and samples do not share
a process: NVML's wait for events blocks its thread, a question to a broken GPU may block for ever,
and after a crash the agent must know which GPU was asked. The child for samples keeps running only
if callers want samples often. There, :mod:`.child_profiling` asks for the activity of GPUs, for
metrics.
"""
