"""Why a container with GPUs ended.

:mod:`shim.causes.record` is the file per container through which the node agent and the shim
exchange faults. :mod:`shim.causes.xids` is the one table of the driver's numbered errors, and
:mod:`shim.causes.exit_message` describes faults in one line. The node agent uses these three.
"""
