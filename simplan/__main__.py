"""Entry point of ``python -m simplan``, equivalent to the console script ``simplan``."""

import sys

from simplan.cli import main

sys.exit(main())
