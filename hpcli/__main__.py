"""``hpcli`` and ``python -m hpcli``, for people and for launchers that start a module."""

import sys


def main() -> int:
    """Run the command line. Nothing is imported before Ctrl-C is answered for."""
    try:
        from hpcli.app import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
