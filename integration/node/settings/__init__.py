"""The settings of the device plugin, and the flags, variables and files that set them."""
