"""``python -m simplan``: the same as the console script ``simplan``."""

import sys

from simplan.cli import main

sys.exit(main())
