"""What is wrong with a node, and what to do about it: ``nvshim doctor``.

Two halves that meet in values::

    places.py       where things are on this node, or below another root
    observing/      the edge: looks at files, processes and programs, with a limit of time for each
    facts.py        what was seen, as values that JSON has
    advisories.py   which versions of other people's programs have known vulnerabilities
    checks/         pure functions of the facts, in a table: what is wrong, and what to do
    findings.py     what a check says
    examination.py  all of it, in order
    identity.py     which node it is: the head of a report
    bundle.py       facts and findings in one file, for a request of support

Rules
- A check decides and looks at nothing. What it needs is named in its row, and no more is gathered
  than the checks that were asked for need.
- What could not be seen (a right that is missing, a program that hangs) is a note of each check
  that needed it, "could not look", and never a failure of the whole.
- Nothing is changed, no container is started, and no cluster is asked unless somebody names its
  configuration.
- A fact holds only what a check needs. No value of an environment variable, no argument of a
  process and no key of a configuration that is not in :mod:`~integration.doctor.facts` is kept; so
  the bundle has no secrets to lose.
- Text of others (names of containers, devices, files) is escaped where it becomes a finding.
"""
