"""The Container Runtime Interface (CRI), as a kubelet uses it.

- :mod:`.client`: one typed method for each call of the interface (:mod:`api.proto.cri_pb2`).
- :mod:`.engine`: the engine that serves it, and the settings that it reports.
"""
