# SPDX-License-Identifier: Apache-2.0
"""Model-Optimizer (nvidia-modelopt): the released layout, with what its exporter adds.

It always says whether a block attends causally, which is what it is known by.
"""

from vllm_domino.makers.layout import MISSING, Maker, architectures, look_up
from vllm_domino.makers.released import ARCHITECTURE

MODELOPT = Maker(
    name="modelopt",
    title="Model-Optimizer",
    claims=lambda raw: (
        ARCHITECTURE in architectures(raw)
        and look_up(raw, "dflash_config.causal") is not MISSING
    ),
)
