"""Read and change an image's files, which are hostile, through a single object.

:class:`rootfs.Rootfs` is that object; no other module opens a path of an image. Other rooms use it,
:mod:`~hooks.image.layout` (where an image's dynamic loaders search), :mod:`~hooks.image.placement`
(which writes a plan's files) and the parsers :mod:`~hooks.image.elf` and
:mod:`~hooks.image.ldcache`.
"""
