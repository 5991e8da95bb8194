"""Mounting and unmounting a container's root file system.

:mod:`shim.rootfs.mounts` mounts and unmounts, :mod:`shim.rootfs.detaching` unmounts without waiting
for the disk, :mod:`shim.mountinfo` finds mounts that may hang, :mod:`shim.rootfs.overlay` adds a
layer to an overlay, and :mod:`shim.rootfs.proc_cover` covers files of a container's procfs.
"""
