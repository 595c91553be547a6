"""Defects of torch that are not reported yet, each as a program to be reported: imports torch only.

`python tests/sweep/reports/roll.py` prints what torch gives, and what is right.
"""
