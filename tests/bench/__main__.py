"""`python -m tests.bench`."""

import sys

from tests.bench.bench import main

sys.exit(main())
