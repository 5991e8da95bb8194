"""What Prometheus is told: of the node's GPUs, of who has them, and of the agent itself.

::

    snapshot.py    what the state and NVML know at the time of a scrape
    metric.py      a metric: name, meaning, labels, values
    agent.py, gpus.py, containers.py   the tables: name, meaning, labels, values
    text.py        all of them, in order, and how prometheus-client writes them
    address.py     where they are served
    server.py      connections: few, short, and none waits for another
    service.py     the service of the agent: one scrape after the other

prometheus-client is imported by those only who serve metrics: it costs an agent 4 MB. Its registry
and its HTTP server, which has a thread for each request, are not used: what is told is what the
state knows at that moment.
"""
