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


def two_sample_p_value(first: torch.Tensor, second: torch.Tensor) -> float:
    """Chi-square of homogeneity: are two lists of counts draws from one distribution?

    Cells too rare to count on are pooled, by how often they come in both together.
    """
    share = second.sum() / (first.sum() + second.sum())
    both = first + second
    common = both * torch.minimum(share, 1 - share) >= LEAST_EXPECTED
    cells = torch.stack([first, second])
    rare = cells[:, ~common].sum(dim=1, keepdim=True)
    cells = torch.cat([cells[:, common], rare], dim=1)
    cells = cells[:, cells.sum(dim=0) > 0]
    expected = cells.sum(1, keepdim=True) * cells.sum(0, keepdim=True) / cells.sum()
    statistic = ((cells - expected) ** 2 / expected).sum()
    freedom = torch.tensor((cells.shape[1] - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
