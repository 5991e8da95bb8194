"""The cluster's API server: credentials, connections, calls, and the reasons of refusals."""
