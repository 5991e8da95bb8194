"""What a container requests, and what of it policy allows.

:func:`glance.may_ask` tells quickly that a container requests nothing; :func:`request.read_request`
reads a request from all places of a spec; :func:`policy.judge` removes what the container may not
have. :mod:`~hooks.requests.oci_hooks` knows the hooks of NVIDIA's that a spec may have. Other rooms
use these modules; :mod:`~hooks.requests.request` (the places) and :mod:`~hooks.requests.naming`
(the syntax of device names) are internal.
"""
