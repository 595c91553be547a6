"""The doctor, `python -m gradkit`: what is installed, and what people get wrong, run live."""
