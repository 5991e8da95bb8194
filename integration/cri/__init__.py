"""The Container Runtime Interface, as a kubelet uses it: a client, its streams, and a node for it.

A pod is run over containerd's own socket, by the plugin that serves kubelets::

    with PrivateContainerd(cri=CriPlugin(handlers)) as containerd, Cri(containerd.address) as cri:
        pod = cri.run_pod_sandbox(RunPodSandboxRequest(config=..., runtime_handler="nvidia"))
        cri.create_container(CreateContainerRequest(pod_sandbox_id=pod.pod_sandbox_id, ...))

- :mod:`.client`: one typed method for each call of the interface (:mod:`api.proto.cri_pb2`).
- :mod:`.streaming`: exec, attach and port-forward through the URL that the server gives.
- :mod:`.websocket`: what these speak, RFC 6455.
- :mod:`.plugin`: the plugin's configuration, and a pod network of its own.
"""
