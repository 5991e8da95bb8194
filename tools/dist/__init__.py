"""The self-contained tree, and the archives and packages made from it: ``make dist``.

A tree runs from any directory, on any Linux of its architecture. It contains its interpreter, the
interpreter's libraries, libc and loader, and no path of another machine::

    bin/        containerd-shim-nvidia-v1 and nvshim (native, static), each with its program .py
    lib/        api hooks shim integration, and what the shim imports
    lib-node/   modules that only the command line and the node agent import
    runtime/    bin/python3, lib/ with the libraries and lib/python3.N, as/ with names for processes
    share/      units, completions, manual pages, licenses, the SBOM
    tree.json   what the tree is, and a digest of every file (:mod:`~integration.tree`)

Modules::

    manifest.py      tree.json: written, read, verified
    inputs.py        what a tree is made from, and a fingerprint of that
    interpreter.py   runtime/, from Debian's packages
    modules.py       lib/ and lib-node/, from the sources and from PyPI
    share.py         share/
    sbom.py          the SBOM in two formats
    man.py           manual pages, from the help texts
    build.py         the whole tree
    archive.py       the tarball
    payload.py       what all packages have in common
    debian.py        the .deb
    rpm.py           the .rpm
    failures.py      the error line of a failed build
    project.py       the project's metadata in pyproject.toml

Rules
- A tree never changes once it is installed, because running shims map its files. So nothing writes
  to it (all bytecode is included, and is not checked against its source), and another version is
  another tree.
- The same sources and packages give the same bytes: names are sorted, times are the commit's, the
  owner is root, and bytecode is compiled with a fixed seed in a fixed order.
- The tree's loader searches the system's directories for libraries that the tree lacks, which are a
  driver's. The tree contains all libraries that it needs itself; the build checks that.

Source: ld.so(8); reproducible-builds.org, SOURCE_DATE_EPOCH; PEP 552.
"""
