"""The shim on a real GPU: a bundle that any machine with one can run, and what it finds there.

GPUs are rare, and a machine that has one is often bare: no network, no compiler, no containerd.
So everything that a proof needs is collected where there is a network (``make gpu-bundle``), as
one directory::

    gpu-bundle/bin/run-on-gpu   the program: run-on-gpu --out REPORT
    gpu-bundle/lib/ runtime/ …  the self-contained tree that nodes get, and this package
    gpu-bundle/programs/        containerd, runc, containerd's own shim, their libraries
    gpu-bundle/image.tar        the containers' image

and ``run-on-gpu`` proves there, in containers through this shim, that GPUs work in containers that
were given them, and in no others.

==============  =============================================================================
bundle          makes the directory (``python -m tools.gpu.bundle DIRECTORY``)
image           the image of the containers, with test programs (``gpu.c``)
run             the run: prepare, facts, checks, figures, report
machine         a place to work in, mounts and cgroups of a machine that may lack half of them
containers      containers for checks
checks          what is proved
capabilities    what is proved of each driver capability alone
figures         memory and time of a start
report          results as values, as Markdown, as JSON
==============  =============================================================================
"""
