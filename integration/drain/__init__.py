"""Taking a GPU, a MIG device or the driver out of service, and back: who holds it, and until when.

A mark (:mod:`hooks.node.drained`) is all the state there is: the shim, the node agent and the
commands read it, and it outlives all of them. :mod:`.marks` writes it, :mod:`.targets` says what a
person means, :mod:`.holders` lists who holds it, :mod:`.waiting` waits for them or ends them, and
:mod:`.resetting` resets a GPU that nobody holds.
"""
