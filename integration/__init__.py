"""How the shim meets the world: CLI, node agent, engines, installation, Kubernetes.

docs/architecture.md has the floors, each of which imports only those below it.
"""
