"""The node agent: what of a node's GPUs has to be kept true while nobody starts a container.

::

    changes.py   hears that something may have changed: uevents, inotify
    refresh.py   looks, and brings the CDI spec and the inventory up to date
    agent.py     goes round, says how it is, ends when told
"""
