"""The short-lived programs that containerd runs: start, delete, -info and -v.

containerd waits for each of them, and reads their output as the answer. :mod:`shim.verbs.verbs`
does one; :mod:`shim.verbs.invocation` reads the flags. :mod:`shim.verbs.warmstart` is the client
and the protocol of the fork server, and :mod:`shim.verbs.handover` turns a process into the shim.
No other room imports from here except the fork server, which does a verb on behalf of the launcher.
"""
