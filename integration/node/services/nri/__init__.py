"""The NRI service: give pods their GPUs where no RuntimeClass of the shim's is used.

::

    service.py      registers with containerd or CRI-O, and answers it
    decision.py     what one container gets: the engine's decision, by the kubelet's record alone
    messages.py     a container's message as an OCI spec, and an edited spec as an answer
    records.py      STATE/nri/CONTAINER: what was given, and the files that are mounted from there

The engine (:mod:`hooks.engine`) is the same as the shim's. What differs: the image is not mounted
yet, and an answer has devices, mounts and variables only.
"""
