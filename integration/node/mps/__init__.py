"""MPS: the control daemon of each resource that is shared by it, and what its clients need.

With NVIDIA's Multi-Process Service the processes of several containers work on one GPU at the same
time, each within its share of memory and of threads. It has three sides::

    container              libcuda: a client, which finds the control daemon by its pipe directory
    nvidia-cuda-mps-control   one per resource: starts servers, and knows the clients' limits
    nvidia-cuda-mps-server    holds the GPU, which nobody else may open meanwhile

All programs are the driver's. Modules::

    claims.py      the same for what resource claims ask for                   (pure)
    places.py      where everything lies, in the host and in containers
    plan.py        what a resource needs: devices, limits                      (pure)
    containers.py  what a container gets, and when; what others are told       (pure)
    launch.py      the child that becomes a daemon, or speaks to one
    daemon.py      one daemon: found again, started, asked, stopped
    host_setup.py  what all of them stand on: directories, shared memory, labels
    modes.py       compute modes: how many processes may open a GPU
    users.py       which containers have a daemon's pipes
    keeper.py      keeps one going
    component.py   which there are to be

Sources: nvidia-cuda-mps-control(1); "Multi-Process Service", NVIDIA; k8s-device-plugin,
cmd/mps-control-daemon.
"""
