"""The device plugin: announces the node's devices to the kubelet, and answers Allocate."""
