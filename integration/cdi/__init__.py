"""CDI specs as an administrator works with them; what they mean is :mod:`hooks.cdi`'s.

The logic behind ``nvshim cdi``::

    writing.py       a spec as text, put in place in one step
    listing.py       which device is in which file, and which of several files counts
    checking.py      what is wrong with spec files, and what of the host they name is gone
    transforming.py  the same spec for another root
    errors.py        what can go wrong
"""
