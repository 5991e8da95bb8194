"""``make packages``: run packages that use NVIDIA's driver, and compare the results with the table.

The table is ``integration/inspection/driver_packages.toml``; ``programs.toml`` has a program for
each package to run. :mod:`tools.driver_use.image` creates the image,
:mod:`tools.driver_use.running` runs the programs in containers of the shim on a simulated node,
:mod:`tools.driver_use.compare` compares.
"""
