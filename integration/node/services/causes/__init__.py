"""The causes service: write a file for each container with the GPU faults that affected it.

::

    service.py     records faults, as a service of the agent
    files.py       their files in STATE/causes, written by a thread
    query.py       reads them

:mod:`integration.node.faults` decides which containers a fault hits. Faults for memory limits come
from :mod:`integration.node.services.memory_guard`.
"""
