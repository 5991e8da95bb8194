"""This project on the nodes of a Kubernetes cluster.

``nvshim node-installer`` is what the installer's DaemonSet runs on each node, in place of NVIDIA's
nvidia-ctk-installer. Its image holds nothing but the tree that ``make dist`` makes. It takes the
node's lock, copies the tree below the node's prefix, and from there on does what a person would do:
it runs the node's own copy in the node's root, for ``nvshim install`` and ``nvshim configure``. So
these two only ever see a system's ordinary paths, and what an installer does can be done by hand.

Rules
- One installer at a time works on a node, and it says so to NVIDIA's: both lock the same file.
- It may be killed at any step, and started again: each step is whole or not there, and finds out by
  itself whether it has still something to do.
- It restarts nothing unless it was told to. Whether the engine has yet to be restarted is told by
  asking the engine, so that a restart by anybody is noticed.
- What another tool takes away is put back, later each time, so that it never fights.
- When it is told to end it leaves the node as it is: an update of a DaemonSet ends each installer
  once. Only if it was asked to clean up, everything is taken back.
- What is in the image, the node's files and the cluster's variables are data; nothing of it is
  given to a shell.

================= ==============================================================================
``environment``  the variables, NVIDIA's among them, and what becomes of each → settings
``settings``     what an installer is asked to do
``host``         the node's root: its files, and programs that run in it
``validations``  the files by which the GPU operator's parts wait for each other
``status``       what the installer is doing, for probes, people and programs; its log
``handlers``     which handlers the engine has, asked through the CRI
``backoff``      when to put back what another tool took away
``entering``     a program of the node, in the place of the container's
``installer``    the steps, in their order
``manifests/``   what is given to ``kubectl apply -k``
================= ==============================================================================

Source: nvidia-container-toolkit cmd/nvidia-ctk-installer; gpu-operator assets/.
"""
