"""``python3 -IS -m shim``: the same as the launcher, for a checkout."""

from shim.verbs import main

if __name__ == "__main__":
    main()
