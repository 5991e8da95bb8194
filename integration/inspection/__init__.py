"""Show what a node has and what runs on it.

Everything here only reads, except :mod:`integration.inspection.settings`, which edits our own
configuration file::

    shim_list.py      shims, fork servers and spares, with their containers
    gpus.py           the node's GPUs, and the containers that hold them
    node.py           the driver, where we looked for it, and how fresh the inventory is
    explaining.py     why a container got its devices, or what it would get
    summary.py        the same in ten lines
    timeline.py       the same with every step
    grant_summary.py  NVIDIA devices that a container got from someone other than the shim
    differences.py    two versions of a spec side by side
    settings.py       where each configuration value comes from, and how to change one
    top.py            the frames of ``nvshim top``
    usage_query.py    who uses which GPU now, without an agent
    ledger_query.py   who holds which GPU now, without an agent

Containers themselves are read by :mod:`integration.containers`.

Rules
- What an image, a pod or a process says about itself is untrusted. Names and annotations are
  printed escaped, and a process does not count as a shim because it claims to be one.
- Results are plain JSON values. Every key is always present; an unknown value is null.
- containerd's state directory, procfs and the node's layout come from options and configuration, so
  everything works on a simulated node.
"""
