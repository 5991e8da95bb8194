"""The fork server: shims and verbs are forked from a process that has imported everything.

:mod:`shim.forkserver.forkserver` is the server, and :mod:`shim.forkserver.spares` are the processes
that it forks. The native launcher is here, too. No other room imports from here.
"""
