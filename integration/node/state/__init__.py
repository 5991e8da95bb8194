"""What the services of the agent tell each other, as immutable values in a typed store."""
