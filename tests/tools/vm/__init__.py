"""A virtual machine made from Debian's own packages, for what the host cannot be.

Much of what a shim does depends on version 2 of cgroups and on systemd, and a machine of
development often has one of them in another version, or none. So tests run in a guest::

    python -m tests.tools.vm debian-12 -- python3 -m pytest tests/vm

==================  ========================================================================
``guests.py``       the guests, as values: a release of Debian and the packages in it
``kernel.py``       its kernel: the package unpacked, the image decompressed, the modules chosen
``root.py``         its root: a directory of installed packages, configured to run one job
``disk.py``         disk and initial root
``python.py``       the Python packages that tests need, for the guest's interpreter
``guest.py``        all of these, kept in the cache under a key over what they are made of
``machine.py``      the emulator: one run of one machine
``job.sh``          what runs inside: mounts what is shared, runs the job, tells its exit code
==================  ========================================================================

Rules
- Emulation in software (TCG) only: it is the same everywhere, and needs no permission. A
  program takes about ten times its time; timeouts of tests are stretched by NVSHIM_PATIENCE.
- Nothing of the host changes. What the machine changes of its disk is thrown away; the work
  tree and the cache are shared read-only, at the paths that they have on the host.
- The emulator is killed with whoever started it.

Source: qemu(1), Linux Documentation/arch/x86/boot.rst, mmdebstrap(1), systemd.special(7).
"""
