"""Whether a node does what it is for, tried out: pods with and without GPUs, the plugin, the agent.

The doctor looks at a node and changes nothing; this room makes pods and sees what is in them. So it
finds what no file says: a runtime that drops devices, an exec that fails, a device that the kubelet
does not give.

- :mod:`.checks`: the table of checks, and one module for each kind of them.
- :mod:`.running`: makes them in their order, and has the outcome of each.
- :mod:`.pods`: pods by the engine's CRI, which are removed whatever happens.
- :mod:`.program`, ``probe.c``: what runs in the containers, and what it says.
- :mod:`.sight`: what a container may see and open, judged. Pure.
- :mod:`.kubelet`: what the kubelet can give, and what a plugin answers.
- :mod:`.interrupts`: Ctrl-C and SIGTERM, heeded where nothing is half made.

Rules
- The pods need no registry and no image of ours: they are made of an image that the node has, which
  nothing is run of, with a static program of ours mounted into it.
- They are in the node's network and in no cgroup of the kubelet's. A kubelet removes pods that it
  does not know, within some seconds; then a check is made again with another pod.
- They get a GPU by the environment, trusted for their CAP_SYS_ADMIN, and are not privileged: the
  engine gives them no device besides.
- Nothing of an environment is in a report.

Source: CRI v1; kubelet pkg/kubelet (HandlePodCleanups), apis/podresources/v1.
"""
