"""The one way to ask NVML, which may hang: children with deadlines ask it, never this process."""
