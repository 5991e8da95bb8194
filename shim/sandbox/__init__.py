"""The sandbox API: the shim itself holds a pod's namespaces, without a pause container.

:class:`shim.sandbox.sandbox.Sandbox` is one sandbox, and :mod:`shim.sandbox.pod` reads its
configuration. :mod:`shim.pod.sandbox_service` serves them. Few pods have one.
"""
