"""A release, as users get it: ``make release``.

One directory, ``dist/release``, contains everything that is published under one version::

    containerd-shim-nvidia-VERSION-linux-ARCH.tar.gz     the self-contained tree
    containerd-shim-nvidia_VERSION-1_ARCH.deb
    containerd-shim-nvidia-VERSION-1.ARCH.rpm
    containerd-shim-nvidia-VERSION-linux-ARCH.image.tar  the OCI image of both DaemonSets
    containerd-shim-nvidia-chart-VERSION.tgz             the Helm chart
    containerd-shim-nvidia-VERSION-linux-ARCH.cdx.json   the SBOM, in CycloneDX
    containerd-shim-nvidia-VERSION-linux-ARCH.spdx.json  and in SPDX
    containerd-shim-nvidia-VERSION-linux-ARCH.intoto.json  its inputs: SLSA provenance
    SHA256SUMS                                           of all of the above
    SHA256SUMS.sig                                       by the release key, if there is one

Modules::

    chart.py         the Helm chart's archive
    readiness.py     whether a checkout may be released, and which addresses are missing
    provenance.py    what the release was made from
    signing.py       checksums and the signature
    build.py         all of it

Rules
- Two builds of one commit are identical, byte for byte; so is the signature (Ed25519).
- A commit without the tag ``vVERSION`` produces a preview, and the build says so. A tagged commit
  must be ready: a dated heading in the changelog, no placeholder address, a key.
"""
