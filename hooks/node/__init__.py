"""What this node has: its driver, GPUs, MIG devices and device nodes.

:mod:`~hooks.node.inventory` reads all of it through a :class:`fingerprint.Fingerprint`;
:mod:`~hooks.node.cache` keeps it until one of its sources changes. :mod:`~hooks.node.capabilities`
is the table of the driver's files. :mod:`~hooks.node.host_setup` creates what the engine needs on a
host.
"""
