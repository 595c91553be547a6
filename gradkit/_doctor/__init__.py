"""The doctor, `python -m gradkit`: what is installed, and common confusions, run live."""
