"""The shim on a real GPU: a bundle that any GPU machine can run, and a report of the results.

GPUs are rare, and a machine with one is often bare: no network, no compiler, no containerd. So
everything that the checks need is collected where there is a network (``make gpu-bundle``), as one
directory::

    gpu-bundle/bin/run-on-gpu   the program: run-on-gpu --out REPORT
    gpu-bundle/lib/ runtime/ …  the self-contained tree that nodes get, and this package
    gpu-bundle/programs/        containerd, runc, containerd's own shim, their libraries
    gpu-bundle/image.tar        the containers' image

and ``run-on-gpu`` checks there, in containers of this shim, that GPUs work in containers that
have them, and in no others.

==============  =============================================================================
bundle          makes the directory (``python -m tools.gpu.bundle DIRECTORY``)
image           the image of the containers, with test programs (``gpu.c``)
run             the run: prepare, facts, checks, figures, report
machine         a work directory, mounts and cgroups on a machine that may lack some of them
containers      containers for checks
checks          the checks
capabilities    the checks of each driver capability alone
figures         memory and time of a start
report          results as values, as Markdown, as JSON
==============  =============================================================================
"""
