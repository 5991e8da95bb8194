"""What Create does for a container that asks for GPUs, in a child of the shim that ends.

:mod:`shim.work.injection` is the door: it starts the worker and keeps what the shim needs of its
answer. In the worker, :mod:`shim.work.provision` asks the injection engine, mounts the rootfs and
writes the spec; layers (:mod:`shim.work.layers`) and claims (:mod:`shim.work.claims`) are its own.
"""
