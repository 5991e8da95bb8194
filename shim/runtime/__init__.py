"""runc and crun: how they are called, configured, and done without where that is safe.

:mod:`shim.runtime.runtime` makes the calls, :mod:`shim.runtime.options` reads a handler's options,
and :mod:`shim.runtime.orphans` ends what a dead shim left running.
"""
