"""Layouts of MIG devices for a node: read from a file, compared with NVML, and applied.

::

    format ─▶ plan ─▶ apply ─▶ instances
    state ──┘  │        └── journal
               └─ placing

- :mod:`.profiles`: names of MIG profiles; :mod:`.format`: mig-parted's configuration files
- :mod:`.state`: how the node's GPUs are partitioned now, and the same as a configuration
- :mod:`.placing`, :mod:`.plan`: what has to change so that the GPUs match a layout; both pure
- :mod:`.instances`: brings one GPU to a given state; :mod:`.journal`: what an apply has started
- :mod:`.apply`: the transaction; :mod:`.serving`: what the commands call

Source: NVIDIA/mig-parted, the version v1 of its configuration; NVIDIA's MIG user guide.
"""
