"""What this node has: its driver, GPUs, MIG devices and device nodes.

:mod:`~hooks.node.inventory` is the whole, made by reading the node through a
:class:`fingerprint.Fingerprint`; :mod:`~hooks.node.cache` keeps it until something that it was made
from changes.
:mod:`~hooks.node.capabilities` is the table of the driver's files. What the engine makes on a host
is in :mod:`~hooks.node.host_setup`.
"""
