# SPDX-License-Identifier: Apache-2.0
"""Which is better where fewer tokens are drafted than a block was trained for: the
whole trained block, of which the first are used, or a shorter one?

    python -m tests.measure_draft_block

Prints acceptance lengths on the trained pairs, and the time of one against the other.
"""

import statistics

from rich.console import Console
from rich.table import Table

from tests.engines import PAIRS, Pair, domino_job, run_engine

BLOCKS = ("short", "trained")
NUM_DRAFTS = (2, 3, 4, 6)
ROUNDS = 5


def tau_and_seconds(pair: Pair, num_drafts: int, block: str) -> tuple[float, float]:
    job = domino_job(
        pair.target,
        pair.draft,
        [pair.prompts] * ROUNDS,
        pair.golden["max_tokens"],
        settings={"num_speculative_tokens": num_drafts, "draft_block": block},
    )
    result = run_engine(job | {"record": False}, "v1")
    assert all(batch == pair.golden["outputs"] for batch in result["batches"])
    counters = result["counters"]
    tau = 1 + counters["num_accepted_tokens"] / counters["num_drafts"]
    return tau, statistics.median(result["seconds"][1:])


def main() -> None:
    table = Table("pair", "K", *BLOCKS, "time, trained / short")
    for pair in PAIRS:
        for num_drafts in NUM_DRAFTS:
            seen = [tau_and_seconds(pair, num_drafts, block) for block in BLOCKS]
            taus = [f"{tau:.3f}" for tau, _ in seen]
            ratio = seen[1][1] / seen[0][1]
            table.add_row(pair.folder.name, str(num_drafts), *taus, f"{ratio:.2f}")
    Console(width=80).print(table)


if __name__ == "__main__":
    main()
