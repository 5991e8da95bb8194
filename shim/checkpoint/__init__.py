"""Checkpoint and restore with CRIU.

:mod:`shim.checkpoint.checkpoint` makes the calls; :mod:`shim.checkpoint.criu` reads the options of
a request and finds the files to declare to CRIU.
"""
