"""Node labels: what the scheduler and others select GPU nodes by, with NVIDIA's names.

:mod:`.names` has the labels, :mod:`.decision` decides their values, :mod:`.host` reads what of the
machine the inventory does not have, :mod:`.writers` writes them.
"""
