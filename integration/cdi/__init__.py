"""The logic of ``nvshim cdi``; :mod:`hooks.cdi` defines what specs mean.

::

    writing.py       write a spec as text, in one step
    listing.py       the devices of all spec files, and which file wins
    checking.py      faults of spec files, and host files that they name and that are gone
    transforming.py  change the root of a spec's paths
    errors.py        the errors
"""
