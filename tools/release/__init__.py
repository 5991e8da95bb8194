"""A release, as users get it: ``make release``.

One directory, ``dist/release``, with everything that is published under one version::

    containerd-shim-nvidia-VERSION-linux-ARCH.tar.gz     the self-contained tree
    containerd-shim-nvidia_VERSION-1_ARCH.deb
    containerd-shim-nvidia-VERSION-1.ARCH.rpm
    containerd-shim-nvidia-VERSION-linux-ARCH.image.tar  the OCI image of both DaemonSets
    containerd-shim-nvidia-chart-VERSION.tgz             the Helm chart
    containerd-shim-nvidia-VERSION-linux-ARCH.cdx.json   what is inside, for scanners: CycloneDX
    containerd-shim-nvidia-VERSION-linux-ARCH.spdx.json  and SPDX
    containerd-shim-nvidia-VERSION-linux-ARCH.intoto.json  what it was made of: SLSA provenance
    SHA256SUMS                                           of all of the above
    SHA256SUMS.sig                                       by the release's key, if there is one

Modules::

    chart.py         the Helm chart's archive
    readiness.py     whether a checkout may be released, and the addresses that are to be filled in
    provenance.py    what the release was made of
    signing.py       checksums and the signature
    build.py         all of it

Rules
- Two builds of one commit are the same, byte for byte; so is the signature (Ed25519).
- A commit that is not tagged ``vVERSION`` gives a preview, and says so. A tagged one has to be
  ready: a dated heading in the changelog, no address that is to be filled in, a key.
"""
