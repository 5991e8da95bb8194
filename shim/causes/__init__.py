"""Why a container with GPUs ended.

:mod:`shim.causes.record` is the file through which the node agent and the shim exchange the faults
of a container. :mod:`shim.causes.xids` is the only table of the driver's numbered errors, and
:mod:`shim.causes.exit_message` describes faults in one line. The node agent uses these three.
"""
