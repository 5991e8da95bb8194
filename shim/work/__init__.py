"""What Create does for a container that requests GPUs, in a short-lived child of the shim.

:mod:`shim.work.injection` is the entry point: it starts the worker and keeps the parts of its
answer that the shim needs. In the worker, :mod:`shim.work.provision` calls the injection engine,
mounts the rootfs and writes the spec. Layers (:mod:`shim.work.layers`) and claims
(:mod:`shim.work.claims`) belong to this room, too.
"""
