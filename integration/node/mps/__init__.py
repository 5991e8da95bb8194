"""MPS: the values that the services share about control daemons and their clients.

With NVIDIA's Multi-Process Service, processes of several containers compute on one GPU at the same
time, each within its share of the memory and of the threads. Three programs take part::

    container                 libcuda: a client, finds the control daemon by its pipe directory
    nvidia-cuda-mps-control   one per resource: starts servers and knows the clients' limits
    nvidia-cuda-mps-server    holds the GPU, which no other process may open then

All programs are the driver's. Modules::

    paths.py          the directories and files, on the host and in containers
    plan.py           the daemon of a shared resource: devices, limits, programs   (pure)
    claim_daemons.py  the daemon of a resource claim                               (pure)
    clients.py        the mounts and variables of a client, and when to refuse one (pure)

:mod:`integration.node.services.mps` runs the daemons.

Sources: nvidia-cuda-mps-control(1); "Multi-Process Service", NVIDIA; k8s-device-plugin,
cmd/mps-control-daemon.
"""
