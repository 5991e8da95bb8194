"""From what a container is granted to an edited spec: values, tables and pure functions.

:mod:`~hooks.edits.grant` holds a request against the inventory, :mod:`~hooks.edits.planning`
makes a :mod:`~hooks.edits.plan` of it by the table of :mod:`~hooks.edits.capabilities`, and
:mod:`~hooks.edits.mutation` writes the plan into the spec, which
:mod:`~hooks.edits.verification` checks.
"""
