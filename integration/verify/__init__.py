"""Test a node end to end: run pods with and without GPUs, and query the plugin and the agent.

The doctor inspects a node and changes nothing. This room creates pods and looks inside them, so it
finds faults that no file shows: a runtime that drops devices, an exec that fails, a device that
the kubelet cannot allocate.

- :mod:`.checks`: the table of checks, and one module per kind of check.
- :mod:`.runner`: runs the checks in order and collects their results.
- :mod:`.pods`: creates pods through the engine's CRI and always removes them.
- :mod:`.probe`, ``probe.c``: the program that runs in the containers, and its output.
- :mod:`.visibility`: decides whether a container sees the right devices. Pure.
- :mod:`.kubelet`: which devices the kubelet can allocate, and what a plugin answers.
- :mod:`.interrupts`: delays Ctrl-C and SIGTERM until no pod is half created.

Rules
- The pods need no registry and no image of their own. They use an image that the node already has
  and run a static program that is mounted into it.
- They use the host network, and cgroups outside of the kubelet's. A kubelet removes pods that it
  does not know within seconds; the check is then repeated with another pod.
- They request a GPU through the environment, which is trusted because of CAP_SYS_ADMIN. They are
  not privileged, so that the engine adds no devices of its own.
- A report contains no environment variables.

Source: CRI v1; kubelet pkg/kubelet (HandlePodCleanups), apis/podresources/v1.
"""
