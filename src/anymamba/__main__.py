"""`python -m anymamba`."""

import sys

from anymamba.cli import main

if __name__ == "__main__":
    sys.exit(main())
