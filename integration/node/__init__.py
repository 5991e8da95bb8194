"""The node agent: a daemon on each node that keeps the node's GPUs usable and monitored.

::

    options.py       its options
    agent.py         reads the node on each change, starts the services, writes the status file
    changes.py       waits for uevents
    refresh.py       one round: inventory, CDI spec, device nodes and links
    lock.py          one agent per node
    service.py       the table of services; restarts a service that stops
    reporter.py      writes what a service knows to the cluster
    usage.py         what each container uses of each GPU
    delivery.py      how containers learn of their devices
    spec_files.py    CDI spec files that are replaced in one step
    private_file.py  keeps a lock's file open in one thread only
    engine_query.py  asks the container engine what it can do

    state/           what services share: typed topics with one publisher each
    services/        device plugin, DRA, health, ledger, monitor, MPS, metrics, causes, and others
    values/          values that several services share
    settings/        the device plugin's settings
    device_health/   whether a device can be allocated to a container
    faults/          what GPU errors mean, and which containers they hit
    holders/         who holds devices, and their energy
    mps/             what MPS control daemons need and serve

docs/architecture.md has the table of what services publish and read.
"""
