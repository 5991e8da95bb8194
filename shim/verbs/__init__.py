"""The short-lived programs that containerd runs: start, delete, -info and -v.

containerd waits for each of them, and reads its output as the answer. :mod:`shim.verbs.verbs`
executes one; :mod:`shim.verbs.invocation` reads the flags. :mod:`shim.verbs.warmstart` is the
client and the protocol of the fork server, and :mod:`shim.verbs.handover` turns a process into the
shim. The only other room that imports from here is the fork server, which executes verbs for the
launcher.
"""
