"""The node agent: what keeps a node's GPUs usable while nobody starts a container.

::

    options.py       its options
    agent.py         looks at the node again and again, starts the services, writes the status file
    changes.py       waits for uevents
    refresh.py       one look: inventory, CDI spec, device nodes and links
    lock.py          one agent per node
    service.py       the table of services; restarts those that end
    reporter.py      writes to the cluster what a service knows
    usage.py         what each container uses of each GPU
    delivery.py      how containers learn of their devices
    spec_files.py    CDI spec files that are replaced in one step
    private_file.py  a lock that only one thread holds
    engine_query.py  asks the container engine what it can do

    state/           what services share: typed topics with one publisher each
    services/        device plugin, DRA, health, ledger, monitor, MPS, metrics, causes, and others
    values/          values that several services share
    settings/        the device plugin's settings
    device_health/   whether a device can be given to a container
    faults/          what GPU errors mean, and whom they hit
    holders/         who holds devices, and their energy
    mps/             what MPS control daemons need and serve

docs/architecture.md has the table of what services publish and read.
"""
