"""What is refused, or warned of: most before the engine runs, some during a pass or after it.

Before: `eager_graph`, `reachability`, `higher_derivatives`, `nonreentrant_checkpoints`. While a
function, a pass or an optimizer's step runs: `op_monitor`, `checked`, `steps_without_grads`. After
a pass: `modified_gradients`, `modified_saved_tensors`, and `reachability.require_reached`. The
others hold what these look up, and `sample_independence` tells which rules may run.
"""
