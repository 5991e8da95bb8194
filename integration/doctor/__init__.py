"""Diagnose a node: what is wrong and what to do about it (``nvshim doctor``).

Facts are gathered first; pure checks then judge them::

    places.py       resolves paths of this node, or of a node below another root
    observing/      gathers facts from files, processes and programs, each with a time limit
    facts.py        the facts, as JSON values
    advisories.py   known vulnerabilities of runc, crun, containerd and NVIDIA's toolkit
    checks/         a table of pure functions of the facts: what is wrong, and what to do
    findings.py     the type of a check and of its findings
    examination.py  chooses checks, gathers their facts, runs them
    identity.py     describes the node: the head of a report
    bundle.py       writes facts and findings to one file, for a support request
    codes.py        explains a finding's or an error's code

Rules
- A check decides and reads nothing from the node. Its row names the facts it needs, and only the
  facts of the selected checks are gathered.
- If a fact cannot be gathered (missing permission, hanging program), each check that needs it
  reports a note, "could not look". The examination continues.
- The doctor changes nothing, starts no container, and contacts a cluster only with an explicit
  kubeconfig.
- A fact holds only what a check needs: no values of environment variables, no process arguments,
  and no configuration keys other than those in :mod:`~integration.doctor.facts`. So the bundle
  contains no secrets.
- Foreign text (names of containers, devices, files) is escaped when it becomes a finding.
"""
