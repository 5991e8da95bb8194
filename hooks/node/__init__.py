"""What this node has: its driver, GPUs, MIG devices and nodes, found by looking and kept.

:mod:`~hooks.node.inventory` is the whole; :mod:`~hooks.node.witness` is who looks, so that
:mod:`~hooks.node.cache` knows when it is not true any more. :mod:`~hooks.node.modules`,
:mod:`~hooks.node.nodes` and :mod:`~hooks.node.char_links` are the few things that are made on a
host.
"""
