# SPDX-License-Identifier: Apache-2.0
"""The test by which sampled tokens are held to a distribution."""

import torch

LEAST_EXPECTED = 5  # draws a cell must expect; rarer ones share one
SMALLEST_P = 0.001


def p_value(observed: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Chi-square goodness of fit of counts to probabilities, both flat, float64."""
    expected = probabilities * observed.sum()
    common = expected >= LEAST_EXPECTED
    cells = torch.cat([observed[common], observed[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    if wanted[-1] < LEAST_EXPECTED:
        # Too rare together even: count what falls there with the least common cell.
        cells[-2] += cells[-1]
        wanted[-2] += wanted[-1]
        cells, wanted = cells[:-1], wanted[:-1]
    statistic = ((cells - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
