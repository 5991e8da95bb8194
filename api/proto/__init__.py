"""The messages of containerd's shim API, as ``.proto`` files and generated modules.

``make proto`` regenerates the ``*_pb2.py`` and ``*_pb2.pyi`` next to the sources; a unit test fails
if they are stale. The Task services of versions 2 and 3 differ only in the package's name, so one
file serves both (see :mod:`api.ttrpc.service`).

The type URLs that containerd puts into an ``Any`` are bare names (``containerd.events.TaskExit``),
not ``type.googleapis.com/…``: use :mod:`api.typeurl`, never ``Any.Pack``.
"""
