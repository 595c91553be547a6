"""Looks for derivatives that torch computes wrongly, by finite differences; writes the table.

`python -m tests.sweep` prints what it finds, and with `--write` it writes what gradkit reads:
`gradkit/_checks/wrong_derivatives_table.py`.
"""
