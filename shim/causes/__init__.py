"""Why a container ended, as far as its GPUs have to do with it.

:mod:`shim.causes.record` is what the node agent and the shim tell each other of faults: a file per
container. :mod:`shim.causes.xids` is the one table of the driver's numbered errors, and
:mod:`shim.causes.sentence` puts faults into one line for people. The node agent uses these three.
"""
