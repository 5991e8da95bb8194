"""Install and run the shim on the nodes of a Kubernetes cluster.

The installer's DaemonSet runs ``nvshim node-installer`` on each node, in place of NVIDIA's
nvidia-ctk-installer. Its image holds only the tree that ``make dist`` builds. The installer takes
the node's lock, copies the tree below the prefix on the node, and then runs the node's own copy in
the node's root: ``nvshim install`` and ``nvshim configure``. These two commands therefore see
ordinary host paths, and an operator can repeat by hand what the installer does.

Rules
- One installer works on a node at a time. It locks the same file as NVIDIA's installer.
- It may be killed at any step and started again. Each step is atomic and detects by itself
  whether it has work to do.
- It restarts nothing unless configured to. It asks the engine whether a restart is outstanding, so
  it notices a restart by anyone.
- It restores what another tool removed, but waits longer each time, so that the two do not fight.
- On SIGTERM it leaves the node as it is, because each DaemonSet update stops every installer once.
  It uninstalls only with NVSHIM_REMOVE_ON_EXIT.
- Image contents, host files and variables are data; none of it is passed to a shell.

================= ==============================================================================
``environment``   parses the variables, NVIDIA's among them, to settings
``settings``      the installer's settings
``host``          the node's root: its files, and commands that run in it
``validations``   the ready files with which the GPU operator's components wait for each other
``status``        the installer's status file for probes and programs, and its log
``engine_query``  asks the engine over the CRI which handlers it runs with
``gpu_detection`` detects whether the node has an NVIDIA GPU
``backoff``       when to restore what another tool removed
``host_exec``     replaces the container's process by a program in the node's root
``stop_signals``  turns termination signals into an exception
``installer``     the steps, in order
``manifests/``    for ``kubectl apply -k``
``chart/``        the Helm chart
================= ==============================================================================

Source: nvidia-container-toolkit cmd/nvidia-ctk-installer; gpu-operator assets/.
"""
