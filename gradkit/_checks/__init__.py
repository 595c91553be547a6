"""What is refused, or warned of: most before the engine runs, some during a pass or after it.

Before: `eager_graph`, `reachability`, `higher_derivatives`, `recomputations`. While a function, a
pass or an optimizer's step runs: `checked`, and the monitor of `_torch_bugs`. After a pass:
`modified_tensors`, and `reachability.require_reached`. `circumstances` is what these look up.
"""
