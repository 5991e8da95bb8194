"""The kubelet's device plugin: what it is told of the devices, and what it is told to give."""
