"""The node agent: what of a node's GPUs has to be kept true while nobody starts a container.

::

    changes.py     hears that something may have changed: uevents, files
    watcher.py     files, processes and sockets, heard of by one wait
    refresh.py     looks, and brings the CDI spec and the inventory up to date
    agent.py       goes round, says how it is, ends when told
    components.py  keeps the other parts going, each a package of its own
    backoff.py     how long they wait before they try again
    board.py       what they tell each other
    nvml.py        asks NVML one question, in a child

    monitor/       what NVML and the kernel say of GPUs at work
    health/        whether a device can be given to a container
    ledger/        which container holds what, and uses what of it
    plugin/        what the kubelet is told, and is told to give
    mps/           the control daemons of devices that are shared by MPS
    metrics/       what Prometheus is told
"""
