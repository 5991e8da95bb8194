"""The cluster's API server: credentials, connections, calls, and reports that are retried."""
