"""The reference in docs/reference, made of the code, so that it cannot drift from it.

``make reference`` writes it and the test of it compares, so a change of the code that people
can see (a key, a variable, an error, an option) is a change of a page in the same commit::

    pages.py          which file of docs/ is made of what; writes and compares them
    markdown.py       tables and anchors
    sources.py        our modules as syntax trees: what the code reads, and what it raises
    configuration.py  keys of config.toml, from the parser's own table
    error_codes.py    the table of errors, with the remedies that the code writes into them
    commands.py       nvshim's commands and options, as click has them; exit statuses
    migration.py      what becomes of each key of NVIDIA's config.toml
    metrics.py        the metrics, from their table; dcgm.py: what is made of them
    tables.py         what is one walk over one table: findings, XIDs, capabilities, variables, …
    site.py           the documentation as a site

Rules
- Whatever the code can say, it says: what is written here by hand is only what it cannot.
- A table that is written by hand is complete: a test looks for what the code reads and the
  table has not, and the other way round.
- A page has the same text on every machine: nothing of this one is in it.
"""
