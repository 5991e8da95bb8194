"""GPU events of NVML and the kernel log, and samples of NVML.

The agent calls NVML in child processes: a call may hang, and the agent then abandons the child.
"""
