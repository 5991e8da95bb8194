"""What the faults of a node's GPUs mean for each container: its cause file.

::

    service.py     records faults, as a service of the agent
    files.py       their files in STATE/causes, written by a thread
    query.py       reads them

What faults are, and whom they hit, is in :mod:`integration.node.faults`; the memory guard is
:mod:`integration.node.services.memory_guard`.
"""
