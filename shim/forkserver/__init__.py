"""The fork server: a process with all imports that forks shims and verbs.

:mod:`shim.forkserver.forkserver` is the server, and :mod:`shim.forkserver.prefork_pool` the
processes that it forks in advance. This room also has the native launcher. No other room imports
from here.
"""
