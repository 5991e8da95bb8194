"""runc and crun: call them, configure them, and avoid calls where that is safe.

:mod:`shim.runtime.runtime` makes the calls, :mod:`shim.runtime.fast_path` replaces some,
:mod:`shim.runtime.options` reads a handler's options, and :mod:`shim.runtime.orphans` ends what a
dead shim left running.
"""
