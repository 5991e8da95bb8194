"""The reference in docs/reference, generated from the code, so that both always agree.

``make reference`` writes it and a test compares it, so a visible change of the code (a key, a
variable, an error, an option) changes a page in the same commit::

    pages.py          the generated files of docs/ and their sources; writes and compares them
    markdown.py       tables and anchors
    sources.py        our modules as syntax trees: variables they read, errors they raise
    configuration.py  keys of config.toml, from the parser's own table
    error_codes.py    the table of errors, with the remedies in the code
    commands.py       nvshim's commands and options, from click; exit statuses
    migration.py      the meaning of each key in NVIDIA's config.toml
    metrics.py        the metrics, from their table; dcgm.py: their names in dcgm-exporter
    tables.py         pages from a single table: findings, XIDs, capabilities, variables, …
    site.py           the documentation as a site

Rules
- Text that the code has comes from the code; only other text is written here.
- A handwritten table is complete: a test compares it with the code, in both directions.
- A page has the same text on every machine, and contains nothing about this one.
"""
