"""A node for clients of the CRI, and the streams that a kubelet opens.

A pod is run over containerd's own socket, by the plugin that serves kubelets::

    with CriContainerd(cri=CriPlugin(handlers)) as containerd, Cri(containerd.address) as cri:
        pod = cri.run_pod_sandbox(RunPodSandboxRequest(config=..., runtime_handler="nvidia"))
        cri.create_container(CreateContainerRequest(pod_sandbox_id=pod.pod_sandbox_id, ...))

- :mod:`.plugin`: a containerd with the plugin, its configuration, and a pod network of its own.
- :mod:`.streaming`: exec, attach and port-forward through the URL that the server gives.
"""
