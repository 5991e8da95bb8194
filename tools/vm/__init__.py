"""A virtual machine made from Debian's own packages, for what the host cannot be.

Much of what a shim does depends on version 2 of cgroups and on systemd, and a machine of
development often has one of them in another version, or none. So tests run in a guest::

    python -m tools.vm --guest debian-12 -- python3 -m pytest tests/vm

==============  ============================================================================
``guest.py``    a guest: mmdebstrap installs it with its kernel, mke2fs makes a disk of that, and
                pip gets the Python packages that tests need
``machine.py``  the emulator: one run of one machine
``job.sh``      what runs inside: mounts what is shared, runs the job, tells its exit code
``tools.py``    the programs that this takes
==============  ============================================================================

Rules
- Emulation in software (TCG) only: it is the same everywhere, and needs no permission. A
  program takes about ten times its time; timeouts of tests are stretched by NVSHIM_PATIENCE.
- Nothing of the host changes. What the machine changes of its disk is thrown away; the work
  tree and the cache are shared read-only, at the paths that they have on the host.
- The emulator is killed with whoever started it.

Source: qemu(1), mmdebstrap(1), initramfs-tools(7), systemd.special(7).
"""
