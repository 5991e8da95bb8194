"""The messages of containerd's shim API, as ``.proto`` files and the modules made from them.

``make proto`` regenerates the ``*_pb2.py`` and ``*_pb2.pyi`` next to the sources; a unit test fails
if they are stale. The Task services of version 2 and 3 are identical except for the package's name,
so one file stands for both (see :mod:`api.ttrpc.service`).

The type URLs that containerd puts into an ``Any`` are bare names (``containerd.events.TaskExit``),
not ``type.googleapis.com/…``: use :mod:`api.typeurl`, never ``Any.Pack``.
"""
