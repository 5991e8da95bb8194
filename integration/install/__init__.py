"""Putting versions of this project on a node, switching between them, and taking them away.

Below one prefix every version has a tree of its own, with its interpreter and all that it imports,
and one link says which of them is in effect::

    PREFIX/                         /opt/containerd-shim-nvidia, if nobody says otherwise
        0.1.0-1a2b3c4d/             a tree: the version, and eight digits of its digest
        0.2.0-5e6f7a8b/
        current -> 0.2.0-5e6f7a8b
        previous -> 0.1.0-1a2b3c4d  to where ``nvshim install --rollback`` goes
        .incoming-…, .removing-…, .self-test-…    what an installer works on
    BINDIR/
        containerd-shim-nvidia-v1 -> PREFIX/current/bin/containerd-shim-nvidia-v1
        nvshim -> PREFIX/current/bin/nvshim

Rules
- Nothing of a tree is changed after it has its name: running shims map files of it. It gets its
  name by one rename, after every file of it was verified and is on the disk.
- A new tree starts a container before anything is switched to it. If that fails it is removed,
  and what was in effect still is.
- What is in effect changes by one rename of one link. Whoever is killed at whatever step leaves
  the one or the other in effect; the next run removes what was left.
- A tree goes when no process uses it (:mod:`~integration.install.usage`), and neither link leads
  to it. It is set aside by a rename, looked at again, and only then removed.
- One installer at a time works on a prefix: it holds a lock on the directory itself.
- The program by whose path containerd has started a shim stays until that shim ends. A containerd
  that is restarted looks for it, and *deletes the bundle* of a shim whose program it does not find,
  with the root file system of a running container in it; and it executes it to clean up after a
  shim's end. The path is in the bundle, in ``shim-binary-path``. So an uninstallation under running
  containers takes away all but that, says what stays, and is finished by a second one.

============== =================================================================
``places``     the names above
``trees``      what a directory below the prefix is
``usage``      which processes use which tree
``survey``     all of it as one value: what is there now
``steps``      what can be done to it
``planning``   a survey and a wish → steps; decides, and touches nothing
``effects``    takes the steps
``copying``    from a directory or an archive to a tree that is verified
``checks``     whether the place is one for trees
``selftest``   a container through a shim that is not in effect yet
``leaving``    what a purge removes; who still names the shim
``installing`` the two calls that commands make
``status``     the survey, judged
============== =================================================================

Source: containerd core/runtime/v2/shim_load.go (loadShim) and binary.go (Start); rename(2).
"""
