"""Where rows of docs/silently_wrong.md are reported: numbers that were read on torch's tracker."""

from __future__ import annotations

_FUNCTORCH = "https://github.com/pytorch/functorch/issues/"
_TORCH = "https://github.com/pytorch/pytorch/issues/"

# By the name of the function that shows the row. A row that is not here is not reported.
ISSUES: dict[str, str] = {
    name: _TORCH + number
    for number, names in {
        "192540": "derivative_of_jvp_of_det derivative_of_jvp_of_slogdet "
        "derivative_of_jvp_of_logdet derivative_of_jvp_of_solve",
        "196682": "forward_over_cholesky_inverse",
        "196702": "forward_over_scatter_reduce",
        "175754": "third_of_layer_norm",
        "186256": "third_of_batch_norm",
        "196700": "derivative_of_jvp_of_layer_norm",
        "196701": "jvp_of_jvp_of_cumprod",
        "196698": "derivative_of_jvp_of_householder_product",
        "196705": "jvp_of_logcumsumexp",
        "196703": "second_of_sinc_at_zero",
        "197867": "jvp_of_jvp_of_a_function",
        "104675": "gradient_of_a_singular_matrix",
        "196707": "forward_over_triangular_solve",
        "103316": "entropy_of_a_saturated_sigmoid",
        "93950": "forward_through_padding",
        "52241": "ctc_loss_of_no_log_softmax",
        "193671": "noise_of_rrelu_copied_by_a_hook",
    }.items()
    for name in names.split()
} | {
    "second_in_a_batch_of_layer_norm": f"{_FUNCTORCH}534",
    "second_in_a_batch_of_batch_norm": f"{_FUNCTORCH}534",
    "bessel_without_graph": "https://github.com/pytorch/pytorch/pull/189872",
}
