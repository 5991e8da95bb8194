"""Device nodes of NVIDIA's driver and their /dev/char links, made because somebody asks.

The shim makes what a container needs when the container is made (:mod:`hooks.node.host_setup`,
:mod:`hooks.node.host_setup`). This makes all that the driver has, before any container asks: for
runtimes that are not ours, for programs on the host, and once after a boot::

    expected.py   which nodes the driver has, by procfs
    creating.py   modules loaded, nodes and links made; what was done, row by row
"""
