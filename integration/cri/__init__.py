"""The Container Runtime Interface, as a kubelet uses it.

- :mod:`.client`: one typed method for each call of the interface (:mod:`api.proto.cri_pb2`).
- :mod:`.engine`: which engine serves it here, and what it says of itself.
"""
