"""What torch gets wrong about derivatives, and what it lacks.

`table` says what, and `swept.json` under which transforms and on which releases. `monitor` watches
what is called, and runs `formulas` where torch is wrong. `missing` has what torch raises at.
"""
