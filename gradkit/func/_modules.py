"""The former place of `module_restored`, for rooms that still import it from here."""

from gradkit._state.module_state import module_restored as as_before

__all__ = ["as_before"]
