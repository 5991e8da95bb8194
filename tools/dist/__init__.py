"""The self-contained tree, and what it is handed on as: ``make dist``.

A tree runs from wherever it lies, on any Linux of its architecture: it brings its interpreter, the
interpreter's libraries, libc and loader, and has no path of another machine in it::

    bin/        containerd-shim-nvidia-v1 and nvshim (native, static), each with its program .py
    lib/        api hooks shim integration, and what the shim imports
    lib-node/   what only the command line and the node agent import besides
    runtime/    bin/python3, lib/ with the libraries and lib/python3.N, as/ with names for processes
    share/      units, completions, manual pages, licenses, the list of what is inside
    tree.json   what the tree is, and a digest of every file (:mod:`~integration.tree`)

Modules::

    manifest.py      tree.json: written, read, verified
    inputs.py        what a tree is made of, and the name of that
    interpreter.py   runtime/, from Debian's packages
    modules.py       lib/ and lib-node/, from the sources and from PyPI
    share.py         share/
    sbom.py          the lists of what is inside
    man.py           manual pages, of what the help says
    build.py         a tree of all that
    archive.py       the tarball
    payload.py       what packages of distributions have in common
    debian.py        the .deb
    rpm.py           the .rpm
    failures.py      what a person is told when it fails
    project.py       what pyproject.toml says of the project

Rules
- A tree is never changed once it is in place: running shims map its files. So nothing writes into
  it (no bytecode: all of it is there, and is not checked against its source), and another version
  is another tree.
- The same sources and packages give the same bytes: names are sorted, times are those of the
  commit, the owner is root, bytecode is compiled with a fixed seed in a fixed order.
- What the tree's loader is asked for and the tree lacks, a driver's libraries, it looks for where
  the system has it; what the tree itself needs, it has (that is checked when it is built).

Source: ld.so(8); reproducible-builds.org, SOURCE_DATE_EPOCH; PEP 552.
"""
