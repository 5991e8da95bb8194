"""The NRI service: give pods their GPUs without a RuntimeClass for the shim.

::

    service.py      registers with containerd or CRI-O, and answers its calls
    decision.py     decides what a container gets, with the engine and the kubelet's record alone
    messages.py     translates a container's message to an OCI spec, and an edited spec to an answer
    records.py      STATE/nri/CONTAINER: what a container got, and the files that it has mounted

The engine (:mod:`hooks.engine`) is the same as the shim's. There are two differences: the image is
not mounted yet, and an answer consists of devices, mounts and variables only.
"""
