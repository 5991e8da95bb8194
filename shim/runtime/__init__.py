"""runc and crun: how to call and configure them, and do without them where that is safe.

:mod:`shim.runtime.runtime` makes the calls, :mod:`shim.runtime.options` reads a handler's options,
and :mod:`shim.runtime.orphans` ends what a dead shim left running.
"""
