"""From a request to an edited spec: tables and pure functions.

:mod:`~hooks.edits.grant` chooses devices from the inventory, :mod:`~hooks.edits.planning` and
:mod:`~hooks.edits.features` plan their edits, and :mod:`~hooks.edits.compat` decides about an
image's own libcuda. :mod:`~hooks.edits.requirements` and :mod:`~hooks.edits.exclusions` refuse
containers that must not start. :mod:`~hooks.edits.mutation` writes the plan into the spec, and
:mod:`~hooks.edits.verification` checks the result.
"""
