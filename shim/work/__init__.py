"""The part of Create that runs in a short-lived child, for containers that request GPUs.

:mod:`shim.work.injection` is the entry point: it starts the worker and keeps the needed parts of
its answer. In the worker, :mod:`shim.work.provision` calls the injection engine, mounts the rootfs
and writes the spec. Layers (:mod:`shim.work.layers`) and claims (:mod:`shim.work.claims`) belong to
this room, too.
"""
