"""The kubelet on this node: register plugins, serve at sockets, and ask the pod-resources API."""
