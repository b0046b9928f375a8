"""The command line: ``python -m torchcomp``."""

from torchcomp.advisor.command import main

if __name__ == "__main__":
    raise SystemExit(main())
