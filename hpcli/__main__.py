"""``python -m hpcli``: the same program as the ``hpcli`` script, for launchers that start a module."""

import sys

from hpcli.app import main

if __name__ == "__main__":
    sys.exit(main())
