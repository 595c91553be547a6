"""Rewrites training loops from `.grad` to gradkit, where the weights surely stay the same.

The command is in `command.py`; `migrate` takes the source of one file.
"""

from gradkit_migrate.migration import Migrated, migrate
from gradkit_migrate.reasons import SkippedLoop

__all__ = ["Migrated", "SkippedLoop", "migrate"]
__version__ = "0.2.0"
