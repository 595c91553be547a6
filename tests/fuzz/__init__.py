"""Random programs, each run with gradkit and with plain torch: `python -m tests.fuzz`."""
