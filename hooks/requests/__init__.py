"""What a container requests, and what of it policy allows.

:func:`prefilter.prefilter` decides quickly whether a container requests anything;
:func:`request.read_request` parses the request. Both read the table of
:mod:`~hooks.requests.places`. :func:`policy.judge` removes what the container may not have.
:mod:`~hooks.requests.oci_hooks` knows NVIDIA's hooks that a spec may have. Other rooms use these
modules; :mod:`~hooks.requests.naming` (the syntax of device names) is internal.
"""
