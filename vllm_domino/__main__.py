# SPDX-License-Identifier: Apache-2.0
"""``python -m vllm_domino``, and ``accelerate launch -m vllm_domino``."""

from vllm_domino.cli import main

if __name__ == "__main__":
    main()
