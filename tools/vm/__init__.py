"""A virtual machine made from Debian's own packages, for tests that the host cannot run.

Much of what a shim does depends on cgroup v2 and on systemd. A development machine often has
another version of one of them, or none. So tests run in a guest::

    python -m tools.vm --guest debian-12 -- python3 -m pytest tests/vm

==============  ============================================================================
``guest.py``    a guest: mmdebstrap installs it with its kernel, mke2fs creates a disk from it, and
                pip downloads the Python packages that tests need
``machine.py``  the emulator: one run of one machine
``job.sh``      runs inside: mounts the shares, runs the job, reports its exit code
``tools.py``    the programs that this needs
==============  ============================================================================

Rules
- Emulation in software (TCG) only: it is the same everywhere, and needs no permission. A program
  takes about ten times as long; NVSHIM_PATIENCE stretches the timeouts of tests.
- The host does not change. Changes of the machine's disk are discarded; the work tree and the cache
  are shared read-only, at the same paths as on the host.
- The emulator is killed when the process that started it exits.

Source: qemu(1), mmdebstrap(1), initramfs-tools(7), systemd.special(7).
"""
