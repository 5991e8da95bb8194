"""What NVML and the kernel say of the GPUs while they work: events and samples.

NVML is asked in children of the agent: one of theirs may hang, and is left alone then.
"""
