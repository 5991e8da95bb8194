"""``nvshim``: what people and scripts ask of this project on a node.

One program with a command per question. Each command is a module here that is imported when
it is asked for, so that ``nvshim list`` pays for nothing that ``nvshim configure`` needs::

    app.py       the table of commands, and how a failure ends the program
    lazy.py      a group of commands that are imported when they are asked for
    output.py    one answer as a table, as names, as JSON or as YAML
    tables.py    rows as lines that are no wider than the terminal
    kinds.py     of which kind each command's document is
    exits.py     the exit statuses
    options.py   the options that many commands have

Rules
- A command decides nothing: it asks a room (:mod:`hooks`, ``integration.engines``, …) and
  hands the answer to :class:`~integration.cli.output.Output`. What can be tested without a
  command line is not here.
- The answer goes to stdout, everything else to stderr, so that ``nvshim … -o json | jq`` works.
- A failure is one line with its code (:mod:`api.errors`) and status 1; with ``-o json`` or
  ``-o yaml`` the same as a document, on stderr.
- A table fits the terminal, or 80 columns where there is none. A document is an object with
  ``apiVersion`` and ``kind``, and has the keys of docs/reference/nvshim.schema.json.
- Colours and progress appear on a terminal only, and never if ``NO_COLOR`` is set.
- The shim imports nothing of this (a contract of the linter): click and rich belong to people.
"""
