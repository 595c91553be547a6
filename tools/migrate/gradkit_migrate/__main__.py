"""`python -m gradkit_migrate`; short, as Python asks for a file of this name."""

import sys

from gradkit_migrate.command import main

sys.exit(main())
