"""Install versions of this project on a node, switch between them, and uninstall them.

Every version has its own tree below one prefix, with its interpreter and all its dependencies. One
link selects the current version::

    PREFIX/                         /opt/containerd-shim-nvidia by default
        0.1.0-1a2b3c4d/             a tree: the version, and eight digits of its digest
        0.2.0-5e6f7a8b/
        current -> 0.2.0-5e6f7a8b
        previous -> 0.1.0-1a2b3c4d  the target of ``nvshim install --rollback``
        bindir -> BINDIR            if it is not a default one, for a later command to find;
                                    bindir.2, bindir.3, … lead to further ones
        .incoming-…, .removing-…, .self-test-…    work in progress
    BINDIR/
        containerd-shim-nvidia-v1 -> PREFIX/current/bin/containerd-shim-nvidia-v1
        nvshim -> PREFIX/current/bin/nvshim

Rules
- A tree never changes once it has its final name, because running shims map its files. One rename
  gives it that name, after every file was verified and synced.
- A new tree has to start a container before we switch to it, and to read the node's configuration
  if the current version can. If it cannot, the tree is removed and the current version stays.
- A switch is one rename of one link. If an installer is killed, the current version is either the
  old or the new one; the next run removes what the installer left behind.
- A tree is removed once no process uses it (:mod:`~integration.install.usage`) and neither link
  points to it. It is first renamed, then checked again, and only then deleted.
- One installer at a time works on a prefix; it locks the directory itself.
- A program with which containerd started a shim stays until that shim exits. A restarted containerd
  looks for the program. If it is missing, containerd *deletes the bundle* of the shim, together
  with the root file system of a running container. It also runs the program to clean up after the
  shim. The path is in the bundle's ``shim-binary-path``. So if containers are running, an
  uninstallation keeps these programs and reports them, and a second run finishes the job.

============== =================================================================
``trees``      read what is in a directory below the prefix
``usage``      find the processes that use a tree
``survey``     the state of an installation as one value
``steps``      the operations on an installation
``planning``   decide on steps from a survey and a request; touches nothing
``effects``    run the steps
``copying``    copy a directory or an archive to a verified tree
``checks``     check that the prefix is a safe place for trees
``selftest``   start a container through a shim that is not current yet
``uninstall``  purge the state; find engine configurations that name the shim
``installing`` the functions behind the commands
``status``     report a survey and its problems
============== =================================================================

The names and paths are in :mod:`integration.install_layout`.

Source: containerd core/runtime/v2/shim_load.go (loadShim) and binary.go (Start); rename(2).
"""
