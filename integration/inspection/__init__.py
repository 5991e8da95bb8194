"""What a node has and what runs on it, for people who look.

Nothing here changes anything, but :mod:`integration.inspection.settings`, which edits our own
configuration file. What is looked at::

    shim_list.py    shims, fork servers and spares, with their containers
    gpus.py         the node's GPUs, and which containers have them
    node.py         the driver, where it was looked for, and what is known of it
    explaining.py   why a container got what it got, or would get it
    summary.py      that in ten lines
    codes.py        what the code of an error, or of a finding, means
    differences.py  two versions of a spec, side by side
    settings.py     the configuration: where each value comes from, and changing one

Rules
- What an image, a pod or a process says of itself is data: names and annotations are shown
  escaped, and no process is believed to be a shim because it says so.
- Answers are plain values of JSON with every key always there; one that is not known is null.
- Where containerd keeps its state, where procfs is and how the node is laid out comes from
  options and the configuration, so that all of it works on a simulated node.
"""
