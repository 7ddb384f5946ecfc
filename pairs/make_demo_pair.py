# SPDX-License-Identifier: Apache-2.0
"""Makes the project's own demo pair, from nothing but the machine's Python.

    python pairs/make_demo_pair.py pairs/demo [--study docs/demo-pair]

A small Qwen3 chat model learns to write Python functions from the standard library's
source; it answers the prompts that it was not shown, and a Domino draft and a DFlash
draft of the same budget learn from its answers. With ``--study`` a third draft is
trained without the curriculum, and all are measured in vLLM on held-out prompts.

Every stage leaves its result in the work folder; run again, it goes on from there.
"""

import ast
import json
import random
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from vllm_domino.modeling_domino import DominoDraftModel
from vllm_domino.training.data import Document, PackedData
from vllm_domino.training.generate import answer_prompts
from vllm_domino.training.recipe import Recipe
from vllm_domino.training.trainer import METRICS_FILE, train

console = Console()
ROOT = Path(__file__).parent.parent

VOCAB_SIZE = 1024
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<mask>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_POSITIONS = 1024
MAX_SOURCE = 700  # characters of a function; longer ones are left out
NUM_HELD_OUT = 64
NUM_SHOWN = 16  # of those, that `make demo` asks
SEED = 0

TARGET_STEPS = 500
TARGET_BATCH = 16  # packs of TARGET_LENGTH tokens
TARGET_LENGTH = 256
TARGET_RATE = 3e-3
NUM_PROMPTS = 4000  # that the target answers
MAX_ANSWER = 128
# The CPU's KV cache is small, and so are these requests.
ENGINE = {
    "dtype": "float32",
    "max_model_len": MAX_POSITIONS,
    "max_num_seqs": 128,
    "enforce_eager": True,
}
DRAFTS = 8  # K: Domino's block of 8 with shift, DFlash's of 9 without


def functions() -> Iterator[tuple[str, str]]:
    """(what to ask, source) of the standard library's functions, in a fixed order."""
    library = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    seen = set()
    for file in sorted(library.rglob("*.py")):
        if skipped & set(file.relative_to(library).parts):
            continue
        try:
            text = file.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (SyntaxError, UnicodeDecodeError):
            continue
        lines = text.splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
                continue
            source = textwrap.dedent(
                "\n".join(lines[node.lineno - 1 : node.end_lineno])
            )
            if len(source) > MAX_SOURCE or source.count("\n") < 2 or source in seen:
                continue
            seen.add(source)
            signature = source.split("\n", 1)[0].strip()
            yield f"{file.stem}: {signature}", source


def make_tokenizer(texts: list[str], folder: Path) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        mask_token="<mask>",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
        chat_template=CHAT_TEMPLATE,
    )
    wrapped.save_pretrained(folder)
    return wrapped


def train_target(
    chats: list[list[dict[str, str]]], tokenizer: Any, folder: Path
) -> None:
    """A language model of the chats; saved in bfloat16, and used so from there on."""
    documents = [
        Document(tokenizer.apply_chat_template(chat, return_dict=False), 0)
        for chat in chats
    ]
    data = PackedData(documents, TARGET_LENGTH, TARGET_BATCH, SEED)
    torch.manual_seed(SEED)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=TARGET_RATE, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, TARGET_RATE, total_steps=TARGET_STEPS, pct_start=0.05
    )
    for step in track(range(TARGET_STEPS), "target", console=console):
        packs = data.microbatch(step)
        labels = packs.tokens.masked_fill(packs.documents < 0, -100)
        # Packs of short documents: a document may see those before it in its pack.
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=packs.tokens, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 99:
            console.print(f"target step {step + 1}: loss {loss.item():.3f}")
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def recipe(work: Path, name: str, **changes: Any) -> Recipe:
    """configs/train/demo.yaml with this pair's folders and one draft's changes."""
    base = Recipe.read(ROOT / "configs" / "train" / "demo.yaml")
    shape = base.draft.model_copy(update=changes.pop("draft", {}))
    return base.model_copy(
        update={
            "target": str(work / "target"),
            "data": work / "answers.jsonl",
            "output": work / name,
            "draft": shape,
            **changes,
        }
    )


def train_draft(work: Path, name: str, **changes: Any) -> None:
    if (work / name / "bf16").is_dir():
        return
    run = recipe(work, name, **changes)
    trained = (
        run.output / "draft"
        if (run.output / "draft").is_dir()
        else train(run, console, resume=run.output.is_dir())
    )
    draft = DominoDraftModel.from_pretrained(trained, dtype=torch.bfloat16)
    draft.save_pretrained(work / name / "bf16")


@torch.no_grad()
def as_domino(dflash: Path, folder: Path) -> Path:
    """A DFlash draft as a Domino draft whose correction is 0: the same drafts, through
    this package, whose context keys are right on a CPU (vLLM 0.32's own are not)."""
    config = json.loads((dflash / "config.json").read_text())
    config["dflash_config"] |= {
        "projector_type": "domino",
        "shift_label": False,
        "pure_draft_prefix_len": 0,
        "emb_dim": 1,
        "gru_hidden_dim": 1,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    plain = DominoDraftModel.from_pretrained(dflash)
    draft = DominoDraftModel(DominoDraftModel.config_class.from_pretrained(folder))
    draft.load_state_dict(plain.state_dict(), strict=False)
    draft.embed_proj[2].weight.zero_()
    draft.save_pretrained(folder)
    return folder


MEASURE = """
import json, sys
from vllm import LLM, SamplingParams
target, config, prompts, engine, max_tokens = json.loads(sys.argv[1])
llm = LLM(target, speculative_config=config, disable_log_stats=False, **engine)
chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=max_tokens),
                   use_tqdm=False)
counters = {m.name: getattr(m, "values", getattr(m, "value", None))
            for m in llm.get_metrics() if m.name.startswith("vllm:spec_decode")}
texts = [output.outputs[0].token_ids for output in outputs]
print("RESULT" + json.dumps([counters, [list(t) for t in texts]]))
"""


def measure(work: Path, config: dict[str, Any] | None, prompts: list[str]) -> Any:
    """vLLM's counters and the outputs on held-out prompts, in a process of its own."""
    job = json.dumps([str(work / "target"), config, prompts, ENGINE, MAX_ANSWER])
    command = [sys.executable, "-c", MEASURE, job]
    done = subprocess.run(command, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT"):
            return json.loads(line.removeprefix("RESULT"))
    raise RuntimeError(f"vLLM did not finish:\n{done.stdout}{done.stderr[-3000:]}")


def study(work: Path, held_out: list[str], report: Path) -> None:
    """Trains without the curriculum too, measures all, writes a table and pictures."""
    train_draft(work, "no-curriculum", lambda_start=0.0)
    _, plain = measure(work, None, held_out)
    rows, positions = [], {}
    for label, name in (
        ("DFlash", "dflash"),
        ("Domino, no curriculum (lambda 0)", "no-curriculum"),
        ("Domino (lambda from 1)", "domino"),
    ):
        folder = work / name / "bf16"
        if name == "dflash":
            folder = as_domino(folder, work / "dflash-as-domino")
        config = {"method": "domino", "model": str(folder)}
        counters, outputs = measure(work, config, held_out)
        drafts = counters["vllm:spec_decode_num_drafts"]
        accepted = counters["vllm:spec_decode_num_accepted_tokens"]
        by_position = counters["vllm:spec_decode_num_accepted_tokens_per_pos"]
        positions[label] = [count / drafts for count in by_position]
        rows.append((label, drafts, accepted, 1 + accepted / drafts, outputs == plain))
        console.print(rows[-1])
    _write_report(rows, positions, work, report)


def _write_report(
    rows: list[Any], positions: dict[str, list[float]], work: Path, report: Path
) -> None:
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 4))
    for label, rates in positions.items():
        axis.plot(range(1, len(rates) + 1), rates, marker="o", label=label)
    axis.set(xlabel="draft position", ylabel="accepted", ylim=(0, 1))
    axis.legend()
    figure.tight_layout()
    figure.savefig(report.with_suffix(".png"), dpi=120)
    shutil.copy(work / "domino" / "run.png", report.with_name(f"{report.name}-run.png"))
    base = rows[0][3]
    lines = [
        "| draft | blocks | accepted | acceptance length | over DFlash | output equals "
        "plain decoding |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
        *(
            f"| {label} | {drafts:.0f} | {accepted:.0f} | {tau:.3f} | {tau / base:.3f} "
            f"| {'yes' if equal else 'NO'} |"
            for label, drafts, accepted, tau, equal in rows
        ),
    ]
    report.with_name(f"{report.name}-table.md").write_text("\n".join(lines) + "\n")
    console.print("\n".join(lines))


CARD = """\
# The demo pair

A small Qwen3 chat model (`target`), a Domino draft for it (`domino`) and a DFlash draft
of the same budget (`dflash`), made by `make demo-pair` on two CPU cores. They show that
everything works; they are no use for anything else.

* **Trained on** {count} functions of the standard library of Python {version} (its
  source, under the PSF licence), each as a chat: the module and the first line, then
  the whole function. No other data. {held_out} functions were held out; `prompts.json`
  has the first {shown} of them.
* **Target**: 4 layers, width 256, 2.6 million parameters, BPE vocabulary of {vocab},
  bfloat16.
* **Drafts**: 2 layers that see target layers 0 and 2, trained on the target's greedy
  answers to {prompts} of the prompts. Domino: block 8, `shift_label` true, 8 drafts.
  DFlash: block 9, 8 drafts. Recipe: `configs/train/demo.yaml`.
* **Serve it in float32**: `vllm serve pairs/demo/target --dtype float32
  --speculative-config "$(cat configs/demo.json)"`.
"""


def write_card(output: Path, count: int) -> None:
    card = CARD.format(
        count=count,
        version=sys.version.split()[0],
        held_out=NUM_HELD_OUT,
        shown=NUM_SHOWN,
        vocab=VOCAB_SIZE,
        prompts=NUM_PROMPTS,
    )
    (output / "README.md").write_text(card)


def main(
    output: Annotated[Path, typer.Argument(help="Folder of the finished pair.")],
    work: Annotated[Path, typer.Option(help="Work folder.")] = Path(".cache/demo-pair"),
    study_report: Annotated[
        Path | None, typer.Option("--study", help="Also measure; report's path stem.")
    ] = None,
) -> None:
    work.mkdir(parents=True, exist_ok=True)
    pool = list(functions())
    random.Random(SEED).shuffle(pool)
    held_out, shown = pool[:NUM_HELD_OUT], pool[NUM_HELD_OUT:]
    console.print(f"{len(pool)} functions of Python {sys.version.split()[0]}")
    started = time.monotonic()

    def stage(name: str) -> None:
        console.print(f"{name}: done after {(time.monotonic() - started) / 60:.1f} min")

    chats = [
        [{"role": "user", "content": ask}, {"role": "assistant", "content": source}]
        for ask, source in shown
    ]
    if not (work / "target").is_dir():
        tokenizer = make_tokenizer([f"{a}\n{b}" for a, b in shown], work / "tokenizer")
        train_target(chats, tokenizer, work / "target")
    stage("target")
    answer_prompts(
        str(work / "target"),
        [chat[:1] for chat in chats[:NUM_PROMPTS]],
        work / "answers.jsonl",
        console,
        max_tokens=MAX_ANSWER,
        temperature=0.0,
        seed=SEED,
        engine=ENGINE,
    )
    stage("answers")
    train_draft(work, "domino")
    stage("Domino draft")
    # The same data, steps and seed; one query row more, so as many drafts.
    dflash = {"projector": "none", "block_size": DRAFTS + 1, "shift_label": False}
    train_draft(work, "dflash", draft=dflash)
    stage("DFlash draft")
    shutil.rmtree(output, ignore_errors=True)
    shutil.copytree(work / "target", output / "target")
    shutil.copytree(work / "domino" / "bf16", output / "domino")
    shutil.copytree(work / "dflash" / "bf16", output / "dflash")
    prompts = [[{"role": "user", "content": ask}] for ask, _ in held_out[:NUM_SHOWN]]
    (output / "prompts.json").write_text(json.dumps(prompts, indent=1) + "\n")
    shutil.copy(work / "domino" / METRICS_FILE, output / "domino" / METRICS_FILE)
    write_card(output, len(pool))
    console.print(f"the pair is in {output}")
    if study_report is not None:
        study(work, [ask for ask, _ in held_out], study_report)


if __name__ == "__main__":
    typer.run(main)
