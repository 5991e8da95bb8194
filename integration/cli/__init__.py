"""``nvshim``: the command line of this project, for operators and scripts on a node.

One program with many commands. Each command is a module of this room that is imported on use, so
``nvshim list`` does not pay for the imports of ``nvshim configure``::

    app.py       the table of commands, and error handling
    lazy.py      a group whose commands are imported on use
    output.py    output as a table, as names, as JSON or as YAML
    progress.py  progress messages on stderr
    tables.py    tables that fit the terminal
    kinds.py     the kind of each command's document
    options.py   options that several commands share

Rules
- A command decides nothing: it calls another room (:mod:`hooks`, ``integration.engines``, …) and
  passes the result to :class:`~integration.cli.output.Output`. Logic that can be tested without a
  command line belongs elsewhere.
- Results go to stdout, everything else to stderr, so that ``nvshim … -o json | jq`` works.
- A failure is one line with its code (:mod:`api.errors`) and status 1; with ``-o json`` or
  ``-o yaml`` it is a document on stderr.
- A table fits the terminal, or 80 columns without one. A document is an object with
  ``apiVersion`` and ``kind``; docs/reference/nvshim.schema.json has its keys.
- Colours and live progress appear only on a terminal, and no colours if ``NO_COLOR`` is set.
- The shim imports nothing of this room (a contract of the linter): it needs neither click nor rich.
"""
