"""The node agent: what of a node's GPUs has to be kept true while nobody starts a container.

::

    options.py     what it is told to do
    changes.py     hears that something may have changed: uevents, files
    watcher.py     files, processes and sockets, heard of by one wait
    refresh.py     looks, and brings the inventory and the node's CDI spec up to date
    spec_files.py  CDI specs that are kept: that one, and the device plugin's
    agent.py       goes round, says how it is, ends when told
    lock.py        there is one per node
    readiness.py   whether it keeps the node, for who only asks that
    components.py  keeps the other parts going, each a package of its own
    aside.py       what may hang, in a thread for which nobody waits
    backoff.py     how long they wait before they try again
    board.py       what they tell each other
    nvml.py        asks NVML one question, in a child (integration.nvml.children starts it)
    api_server.py  asks the cluster; telling.py says what differs there, until it is taken
    api_status.py  reads why it refuses, and who does

    monitor/       what NVML and the kernel say of GPUs at work
    health/        whether a device can be given to a container
    ledger/        which container holds what, and uses what of it
    plugin/        what the kubelet is told, and is told to give
    mps/           the control daemons of devices that are shared by MPS
    metrics/       what Prometheus is told
    causes/        what the faults of GPUs mean for each container
    dra/           resource claims
"""
