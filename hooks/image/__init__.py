"""An image's files, which are hostile: looked at and changed through one object.

:mod:`~hooks.image.rootfs` is that object; nothing else opens a path of an image.
:mod:`~hooks.image.layout` says where an image's dynamic loaders look,
:mod:`~hooks.image.placement` writes what they need.
"""
