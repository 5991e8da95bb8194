"""The injection engine: a container's request becomes edits of its OCI spec and files in its image.

A pipeline of small values; each arrow is a function with its own tests::

    spec ──read_request──▶ Request ──judge──▶ Request ─┐
                                                       ├─decide──▶ Grant ─┐
    node ──take_inventory──────────────────▶ Inventory─┘                  ├─make_plan──▶ Plan ─▶ …
    image ─read_layout─────────────────────▶ Layout ──────────────────────┘

    Plan ──apply, verify──▶ spec'
         └─place──▶ files

Callers use :mod:`hooks.engine`, :mod:`hooks.config`, :mod:`hooks.errors` and, to decide whether a
container needs the engine at all, :mod:`hooks.requests.prefilter`. The rooms, from the ground up;
each may import those above it in this list (a lint contract checks it):

===================  ==========================================================================
``words, errors``    values, closed lists and errors that all rooms share
``ocispec``          parts of an OCI spec, their shape checked
``plan``             the edits of a spec and an image, as values
``config``           the configuration, ours or NVIDIA's
``requests``         what a container requests, and which part of it policy allows
``image``            the image's files, read and changed through one object
``node``             the node's driver, GPUs and device nodes
``vendors``          AMD's and Intel's GPUs, as a plan
``edits``            the grant, the plan, its application to the spec and the check of the result
``cdi``              CDI specs of any vendor, as a plan; NVIDIA's devices as a CDI spec
``platforms``        NVIDIA's driver on Tegra and WSL2, as a plan
``sharing``          which container has which device, and how many may have it
``prepared``         layers with the files of an injection, shared by containers of an image
``record``           the record of an injection as JSON
``targets``          where a container's files go: its rootfs, or a prepared layer
``engine``           the functions that the shim calls
===================  ==========================================================================

Rules
- Decisions are pure; code that touches the system is short and does only that.
- Decide everything before writing anything.
- The engine adds no OCI hooks, and runs no host program with the container's view of the system.
- Each source of devices (NVIDIA's inventory, a platform, a vendor, a CDI spec) produces a
  :class:`hooks.plan.Contribution`: a plan and the bounds that it keeps. A new source is one more
  contribution.
"""
