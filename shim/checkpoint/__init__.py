"""Checkpoint and restore with CRIU, which few pods use.

:mod:`shim.checkpoint.checkpoint` makes the calls; :mod:`shim.checkpoint.criu` reads the options of
a request and finds the files that CRIU must know about.
"""
