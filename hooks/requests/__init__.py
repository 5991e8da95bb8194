"""What a container requests, and which part of it policy allows.

:func:`prefilter.prefilter` decides quickly whether a container requests anything;
:func:`request.read_request` parses the request. Both use the table of
:mod:`~hooks.requests.places`. :func:`policy.judge` removes what the container may not have.
:mod:`~hooks.requests.oci_hooks` recognises NVIDIA's hooks in a spec. Other rooms use these modules;
:mod:`~hooks.requests.naming` (the syntax of device names) is internal.
"""
