"""The shim on a real GPU: a bundle that any machine with one can run, and what it finds there.

GPUs are rare, and a machine that has one is often bare: no network, no compiler, no containerd.
So everything that a proof needs is collected where there is a network (``make gpu-bundle``), as
one directory::

    gpu-bundle/run-on-gpu       the program: ./run-on-gpu --out REPORT
    gpu-bundle/lib/             the shim and the Python packages that it imports
    gpu-bundle/payload.tar.xz   containerd, runc, containerd's own shim, their libraries, an image
    gpu-bundle/manifest.json    what is in it, and from which commit

and ``run-on-gpu`` proves there, in containers through this shim, that GPUs work in containers that
were given them, and in no others.

==============  =============================================================================
bundle          makes the directory (``python -m integration.gpu.bundle DIRECTORY``)
programs        programs that run beside their own libraries, wherever they are put
image           the image of the containers, with test programs (``gpu.c``)
entry           ``run-on-gpu`` itself: finds ``lib``, and starts …
run             … the run: unpack, prepare, facts, checks, figures, report
machine         a place to work in, mounts and cgroups of a machine that may lack half of them
containers      containers for checks
checks          what is proved
capabilities    what is proved of each driver capability alone
figures         memory and time of a start
facts           what the machine is, for the reader of a report
report          results as values, as Markdown, as JSON
==============  =============================================================================
"""
