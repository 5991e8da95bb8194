"""Node labels, by which the scheduler and others select GPU nodes. They have NVIDIA's names.

:mod:`.names` has the labels, :mod:`.decision` decides their values, :mod:`.host` reads the facts
about the machine that the inventory lacks, and :mod:`.writers` writes the labels.
"""
