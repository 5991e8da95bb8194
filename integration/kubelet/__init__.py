"""The kubelet's sockets on this node: registering plugins with it, and its pod-resources API."""
