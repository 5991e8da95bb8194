"""Device nodes of NVIDIA's driver, their /dev/char links, and the marks of drained devices.

The shim creates the nodes that a container needs (:mod:`hooks.node.host_setup`). This package
creates all nodes of the driver before any container needs them: for other runtimes, for programs on
the host, and once after each boot::

    expected.py      the nodes that the driver has according to procfs
    creating.py      load modules, make nodes and links; report each step
    targets.py       the devices that a command names
    drain_marks.py   write and remove the marks of devices out of service
"""
