"""The programs that containerd runs for a moment each: start, delete, -info and -v.

containerd waits for each of them, and reads what they print as the answer. :mod:`shim.verbs.verbs`
does one; :mod:`shim.verbs.invocation` reads the flags. :mod:`shim.verbs.warmstart` is the client
and the protocol of the fork server, and :mod:`shim.verbs.handover` makes a process the shim. No
other room imports from here but the fork server, which does a verb on behalf of the launcher.
"""
