"""What Prometheus is told: of the node's GPUs, of who has them, and of the agent itself.

::

    counters.py    what the agent has done and heard: numbers that only grow, on the board
    families.py    the table of all metrics: names, labels, meanings
    collecting.py  what the board knows, as values of those
    own.py         the agent's own process
    text.py        how prometheus-client writes them: Prometheus' text format and OpenMetrics
    address.py     where they are served
    exchange.py    a request and an answer, as bytes
    server.py      connections: few, short, and none waits for another
    part.py        one scrape after the other

prometheus-client is imported by those only who serve metrics: it costs an agent 4 MB. Its metric
objects and its HTTP server, which has a thread for each request, are not used: what is told is what
the board knows at that moment, and is written in pieces by the agent's own loop.
"""
