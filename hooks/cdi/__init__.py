"""The Container Device Interface: other vendors' devices, and NVIDIA's for other runtimes.

The manual
----------
A vendor describes its devices in files (CDI specs). A container names them as
``vendor.com/class=name``, and the engine edits its OCI spec as the files say::

    names ──registry.find──▶ Resolution ──applying.contribute──▶ Contribution (a Plan, its bounds)
                 ▲
    files ──files.read──▶ tree ──schema.parse──▶ SpecFile

- :mod:`hooks.cdi.spec`: a spec as values; the syntax of vendors, classes and devices.
- :mod:`hooks.cdi.schema`: the fields of a spec, and the versions that have them.
- :mod:`hooks.cdi.tree`: bounded readers of JSON and YAML that use such tables.
- :mod:`hooks.cdi.files`: opens an operator's file safely; caches YAML files.
- :mod:`hooks.cdi.registry`: the directories of specs; priorities and conflicts.
- :mod:`hooks.cdi.applying`: turns a device's edits into a plan, like NVIDIA's own.
- :mod:`hooks.cdi.nvidia_hooks`: does in process what NVIDIA's CDI hooks do.
- :mod:`hooks.cdi.generating`: writes NVIDIA's devices as a CDI spec without hooks, from the plan
  that a container would get.

People work with specs through ``nvshim cdi`` (:mod:`integration.cdi`).

Rules
-----
- A spec file comes from the operator and may mount any file of the host. So it must belong to root,
  and no other user may write it.
- A broken file does not affect the others. A request for one of its devices fails with an error
  that says what is wrong with the file.
- A hook runs only if the operator has allowed it by name.
- This package is loaded only if a container names a CDI device.

Source: the Container Device Interface Specification, versions 0.3.0 to 1.1.0.
"""
