"""The fork server: shims and verbs are forked from a process that has imported everything.

:mod:`shim.forkserver.forkserver` is the server, and :mod:`shim.forkserver.prefork_pool` the
processes that it forks in advance. The native launcher is here, too. No other room imports from
here.
"""
