"""Its differentiable metrics as losses: SSIM, Pearson's correlation, cosine similarity, SI-SDR."""

import torch
import torchmetrics.functional as F

from tests.works_with._oracles import of_function

PIP = "torchmetrics"


def tries():
    x, y = torch.randn(20, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
    image, other = (
        torch.rand(1, 1, 12, 12, dtype=torch.float64),
        torch.rand(1, 1, 12, 12, dtype=torch.float64),
    )
    yield from of_function(lambda x: F.pearson_corrcoef(x, y), x, "pearson_corrcoef: ")
    yield from of_function(lambda x: F.concordance_corrcoef(x, y), x, "concordance_corrcoef: ")
    yield from of_function(lambda x: F.explained_variance(x, y), x, "explained_variance: ")
    yield from of_function(lambda x: F.r2_score(x, y), x, "r2_score: ")
    yield from of_function(
        lambda x: F.cosine_similarity(x[None], y[None]), x, "cosine_similarity: "
    )
    yield from of_function(lambda x: F.scale_invariant_signal_distortion_ratio(x, y), x, "SI-SDR: ")
    yield from of_function(
        lambda x: F.signal_distortion_ratio(x, y, filter_length=4), x, "SDR: ", tol=1e-4
    )
    yield from of_function(
        lambda x: F.structural_similarity_index_measure(x, other, data_range=1.0),
        image,
        "SSIM: ",
        tol=1e-4,
    )
    yield from of_function(
        lambda x: F.kl_divergence(x[None].softmax(1), y[None].softmax(1)), x, "kl_divergence: "
    )
    yield from of_function(
        lambda x: F.spectral_angle_mapper(
            torch.cat([x, x.flip(2)], 1), torch.cat([other, other**2], 1)
        ),
        image,
        "spectral_angle_mapper: ",
    )
    yield from of_function(
        lambda x: F.universal_image_quality_index(x, other), image, "UQI: ", tol=1e-4
    )
