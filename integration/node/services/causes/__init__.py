"""What the faults of a node's GPUs mean for each container: its cause file, and the memory guard.

::

    hits.py        which containers a fault hits, and whose fault it is for each
    journal.py     what is kept of each container's faults: few of many
    files.py       their files in STATE/causes, written by a thread
    component.py   the part of the agent that does this
    limits.py      how much GPU memory a container may use, and who uses more
    shares.py      how much of it a container has by resource claims, by the kubelet's word
    guard.py       the part of the agent that watches over that
"""
