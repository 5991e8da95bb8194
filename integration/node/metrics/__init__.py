"""What Prometheus is told: of the node's GPUs, of who has them, and of the agent itself."""
