"""The Container Device Interface: other vendors' devices, and NVIDIA's for other runtimes.

The manual
----------
A vendor describes its devices in files (CDI specs); a container names them as
``vendor.com/class=name``; the engine edits its OCI spec as the files say::

    names ──registry.find──▶ Resolution ──applying.contribute──▶ Contribution (a Plan, its bounds)
                 ▲
    files ──files.read──▶ tree ──schema.parse──▶ SpecFile

- :mod:`hooks.cdi.spec`: a spec as values; how vendors, classes and devices may be called.
- :mod:`hooks.cdi.schema`: which fields there are, and since which version.
- :mod:`hooks.cdi.tree`: JSON and YAML, bounded, and read by such tables.
- :mod:`hooks.cdi.files`: a file of the operator's, opened with care; what was read of YAML is kept.
- :mod:`hooks.cdi.registry`: the directories of specs; priorities and conflicts.
- :mod:`hooks.cdi.applying`: a device's edits become a plan, of the same kind as NVIDIA's own.
- :mod:`hooks.cdi.nvidia_hooks`: what NVIDIA's CDI hooks do, done in process.
- :mod:`hooks.cdi.generating`: NVIDIA's devices as a CDI spec without hooks, from the plan that
  a container would get.

People work with specs by ``nvshim cdi`` (:mod:`integration.cdi`).

Rules
-----
- A spec file comes from the operator and may mount any file of the host. So root has to own it,
  and no other user may write it.
- A broken file does not affect the others. A request for one of its devices fails with an error
  that says what is wrong with the file.
- No hook runs that the operator has not allowed by name.
- Nothing of this is loaded unless a container names a CDI device.

Source: the Container Device Interface Specification, versions 0.3.0 to 1.1.0.
"""
