"""The doctor, `python -m gradkit_doctor`: what is installed, and common confusions, run live."""

__version__ = "0.2.0"
