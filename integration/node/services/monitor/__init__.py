"""GPU events from NVML and the kernel log, and samples of NVML.

The agent calls NVML in child processes. A call may hang; then the agent abandons the child.
"""
