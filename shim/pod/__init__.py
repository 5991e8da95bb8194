"""The supervisor: the process that serves the Task API for all containers of a pod.

:mod:`shim.pod.main` prepares, and :mod:`shim.pod.server` serves. :mod:`shim.pod.service` decodes
requests, and decides when the shim exits. :mod:`shim.pod.container` executes requests in the order
of :mod:`shim.pod.operations`, which also publishes exits; :mod:`shim.pod.creation` creates and
removes a container's resources on the node. :mod:`shim.pod.events` delivers events. Other rooms use
:class:`shim.context.ShimContext`, :class:`shim.pod.process.Process` and
:class:`shim.context.Tasks`.
"""
