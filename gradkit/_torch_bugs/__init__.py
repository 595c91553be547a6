"""What torch gets wrong about derivatives, and what it lacks.

`table` says what, `swept` under which transforms and on which releases; `monitor` watches what is
called, and runs `formulas` where torch is wrong. `missing` has what torch itself raises at.
"""
