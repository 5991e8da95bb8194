"""What this node has: its driver, GPUs, MIG devices and device nodes.

:mod:`~hooks.node.inventory` is all of it, made by reading the node through a
:class:`fingerprint.Fingerprint`; :mod:`~hooks.node.cache` keeps it until something that it was made
from changes. :mod:`~hooks.node.capabilities` is the table of the driver's files.
:mod:`~hooks.node.host_setup` has what the engine creates on a host.
"""
