"""What a container asks for, and what of it policy allows.

A glance (:mod:`~hooks.requests.glance`) is all that a container pays that asks for nothing. For
the others :mod:`~hooks.requests.request` reads every place a request can stand in
(:mod:`~hooks.requests.sources`, :mod:`~hooks.requests.naming`), :mod:`~hooks.requests.policy`
narrows it, and :mod:`~hooks.requests.requirements` and :mod:`~hooks.requests.exclusions` hold it
against the node.
"""
