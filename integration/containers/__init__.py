"""The one reader of this node's containers: bundles, processes, cgroups, and who holds devices.

Others look at containers through this room only. It follows no path that a container could make
hang: it reads what the kernel prints, and a child with a deadline does what may still block.
"""
