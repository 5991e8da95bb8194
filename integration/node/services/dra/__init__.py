"""The agent as a driver of Kubernetes' dynamic resource allocation (DRA).

::

    the look, health ──▶ devices ──▶ ResourceSlices in the API server
    kubelet ──▶ claims ──▶ state on disk, a claim's CDI spec ──▶ CDI names

A walk through the room, from the kubelet's call to the container's device:

1. :mod:`.component` is all that is loaded without ``--dra``; :mod:`.values` has what others read.
2. :mod:`.serving` has the sockets, also of the two instances of an update; :mod:`.answering`
   answers calls, or passes them on to the instance at work.
3. :mod:`.driving` is the driver: it holds what claims have, and does one thing after the other.
4. :mod:`.reading` gets a claim from the API server; :mod:`.claims` says what it has been given, and
   whether it can have that; :mod:`.sharing` how it shares it.
5. :mod:`.on_demand` has MIG devices be made for it, by :mod:`.cutting`.
6. :mod:`.applying` has time slices and MPS daemons be as it asks.
7. :mod:`.state` writes down what is prepared; the device plugin reads that, since a device that a
   claim has is not its to give; :mod:`.recalling` stands in for it where it is lost. :mod:`.cdi`
   writes the spec that runtimes read.
8. :mod:`.looking` knows what the node has: :mod:`.parts` is NVML's word on MIG, :mod:`.devices`
   what is told of each device.
9. :mod:`.slices` makes ResourceSlices of that, and :mod:`.publishing` keeps them in the API server;
   :mod:`.former` deletes those that were published by another driver name.

Pure are claims, devices, parts, sharing, slices and values.
"""
