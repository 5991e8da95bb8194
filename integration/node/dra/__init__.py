"""The agent as a driver of Kubernetes' dynamic resource allocation (DRA).

::

    the look, health ──▶ devices ──▶ ResourceSlices in the API server        (publishing)
    kubelet ──▶ claims ──▶ state on disk, a claim's CDI spec ──▶ CDI names   (driving, serving)

Only :mod:`.component` is loaded without ``--dra``; the device plugin reads :mod:`.state`, since a
device that a claim has is not its to give.
"""
