"""Prometheus metrics of the node's GPUs, of the containers that hold them, and of the agent.

::

    snapshot.py    the agent's state and NVML's answer at the time of a scrape
    metric.py      a metric: name, help, labels, and a function that returns its values
    agent.py, gpus.py, containers.py   the tables of metrics
    dcgm.py        the same values as dcgm-exporter's series
    pod_labels.py, jobs.py   labels of pods and jobs, for those series
    text.py        all metrics in order, and their text formats
    address.py     the address to serve at
    server.py      the HTTP server: few and short connections that do not wait for each other
    web.py         TLS and passwords
    service.py     the service of the agent: one scrape after the other

Only an agent that serves metrics imports prometheus-client, which costs 4 MB. The service does not
use its registry, because the values come from the agent's state at each scrape. It does not use its
HTTP server, because that starts a thread for each request.
"""
