"""Take a GPU, a MIG device or the driver out of service, wait for its holders, and return it.

A mark (:mod:`hooks.node.drained`) is the only state: the shim, the node agent and the commands read
it, and it outlives all of them. :mod:`integration.devices.drain_marks` writes it,
:mod:`integration.devices.targets` finds the named devices, :mod:`.holders` lists the holders,
:mod:`.waiting` waits for them or stops them, :mod:`.resetting` resets a GPU without holders, and
:mod:`.serving` is what the commands call.
"""
