"""What Prometheus is told: of the node's GPUs, of who has them, and of the agent itself.

::

    counters.py    what the agent has done and heard: numbers that only grow, on the board
    families.py    the table of all metrics: names, labels, meanings
    collecting.py  what the board knows, as values of those
    own.py         the agent's own process
    text.py        how they are written: Prometheus' text format and OpenMetrics
    address.py     where they are served
    exchange.py    a request and an answer, as bytes
    server.py      connections: few, short, and none waits for another
    part.py        one scrape after the other

prometheus-client has all but the table, and is what the tests judge the output by. It is not used
here: it costs an agent 5 MB, among them an HTTP server with a thread for each request, and writes
a large node's metrics in a quarter of a second in which nothing else is done.
"""
