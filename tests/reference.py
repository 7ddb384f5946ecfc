# SPDX-License-Identifier: Apache-2.0
"""An independent Domino drafter: plain torch, no cache, everything computed anew.

It shares nothing with ``vllm_domino`` nor with vLLM: the target is Transformers', the
draft is written out here from the method's description, one block at a time.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


@dataclass
class Block:
    """What the reference makes of one context."""

    tokens: list[int]  # K drafts
    layers: list[torch.Tensor]  # each layer's output for the query rows, (Q, H)


class Reference:
    """
    Args:
        trained_block: Give every block as many rows as in training; just as many as it
            needs otherwise.
    """

    def __init__(self, target: Path, draft: Path, trained_block: bool = False) -> None:
        self.trained_block = trained_block
        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        self.target.eval()
        self.config = json.loads((draft / "config.json").read_text())
        self.head = self.config["dflash_config"]
        self.weights = {
            name: tensor.float()
            for file in sorted(draft.glob("*.safetensors"))
            for name, tensor in load_file(file).items()
        }
        vocab = torch.arange(len(self.weights["embed_proj.2.weight"]))
        # Which token of the target each token of the draft is.
        self.target_ids = vocab + self.weights.get("d2t", torch.zeros(1)).long()
        self.gru = torch.nn.GRU(
            self.config["hidden_size"],
            self.head["gru_hidden_dim"],
            bias=False,
            batch_first=True,
        )
        self.gru.weight_ih_l0.data = self.weights["prefix_gru.weight_ih_l0"]
        self.gru.weight_hh_l0.data = self.weights["prefix_gru.weight_hh_l0"]

    def draft(self, context: list[int], bonus: int, num_drafts: int) -> Block:
        """Drafts ``num_drafts`` tokens after ``context`` and the bonus token."""
        predicting, layers = self._backbone(context, bonus, num_drafts)
        seen = [bonus]
        for i in range(num_drafts):
            best = int(self._logits(predicting, seen, i).argmax())
            seen.append(int(self.target_ids[best]))
        return Block(seen[1:], layers)

    def logits(self, context: list[int], bonus: int, drafts: list[int]) -> torch.Tensor:
        """(K, V) from which each draft was picked, given those before it."""
        predicting, _ = self._backbone(context, bonus, len(drafts))
        seen = [bonus, *drafts]
        rows = [self._logits(predicting, seen[: i + 1], i) for i in range(len(drafts))]
        return torch.stack(rows)

    @torch.no_grad()
    def _backbone(
        self, context: list[int], bonus: int, num_drafts: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The rows that predict, (K, H), and each layer's output."""
        hidden = self.target(
            torch.tensor([context]), output_hidden_states=True
        ).hidden_states
        features = torch.cat(
            [hidden[i + 1][0] for i in self.head["target_layer_ids"]], dim=-1
        )
        features = self._norm(
            F.linear(features, self.weights["fc.weight"]), "hidden_norm"
        )
        shift = self.head["shift_label"]
        num_masks = num_drafts - 1 if shift else num_drafts
        if self.trained_block:
            num_masks = self.config["block_size"] - 1
        block = [bonus] + [self.head["mask_token_id"]] * num_masks
        rows = self._embed(block)
        layers = []
        for i in range(self.config["num_hidden_layers"]):
            rows = self._layer(i, rows, features)
            layers.append(rows)
        predicting = self._norm(rows, "norm")[0 if shift else 1 :]
        return predicting[:num_drafts], layers

    @torch.no_grad()
    def _logits(self, rows: torch.Tensor, seen: list[int], i: int) -> torch.Tensor:
        """(V,) for draft ``i``, after the bonus and the drafts before it."""
        head = self.weights.get("lm_head.weight", self.target.lm_head.weight)
        logits = F.linear(rows[i], head)
        if i >= self.head["pure_draft_prefix_len"]:
            # The whole prefix goes through the GRU anew at every position.
            state = self.gru(self._embed(seen)[None])[0][0, -1]
            joined = torch.cat([rows[i], state])
            inner = F.silu(F.linear(joined, self.weights["embed_proj.0.weight"]))
            logits = logits + F.linear(inner, self.weights["embed_proj.2.weight"])
        return logits

    def _layer(
        self, index: int, rows: torch.Tensor, context: torch.Tensor
    ) -> torch.Tensor:
        name = f"layers.{index}"
        normed = self._norm(rows, f"{name}.input_layernorm")
        length = context.shape[0]
        query = self._heads(normed, f"{name}.self_attn", "q", length)
        # Context keys carry positions 0.., the block's go on from there.
        keys = torch.cat(
            [
                self._heads(context, f"{name}.self_attn", "k", 0),
                self._heads(normed, f"{name}.self_attn", "k", length),
            ],
            dim=1,
        )
        both = torch.cat([context, normed])
        values = F.linear(both, self.weights[f"{name}.self_attn.v_proj.weight"])
        values = values.view(len(both), -1, self.config["head_dim"]).transpose(0, 1)
        groups = query.shape[0] // keys.shape[0]
        keys = keys.repeat_interleave(groups, dim=0)
        values = values.repeat_interleave(groups, dim=0)
        scores = query @ keys.transpose(1, 2) / self.config["head_dim"] ** 0.5
        mixed = (scores.softmax(dim=-1) @ values).transpose(0, 1).flatten(1)
        rows = rows + F.linear(mixed, self.weights[f"{name}.self_attn.o_proj.weight"])
        normed = self._norm(rows, f"{name}.post_attention_layernorm")
        gate = F.silu(F.linear(normed, self.weights[f"{name}.mlp.gate_proj.weight"]))
        up = F.linear(normed, self.weights[f"{name}.mlp.up_proj.weight"])
        return rows + F.linear(gate * up, self.weights[f"{name}.mlp.down_proj.weight"])

    def _heads(
        self, rows: torch.Tensor, name: str, kind: str, start: int
    ) -> torch.Tensor:
        """Projected, normalised and rotated: (heads, rows, head_dim)."""
        width = self.config["head_dim"]
        projected = F.linear(rows, self.weights[f"{name}.{kind}_proj.weight"])
        heads = projected.view(len(rows), -1, width)
        heads = self._norm(heads, f"{name}.{kind}_norm").transpose(0, 1)
        theta = self.config["rope_parameters"]["rope_theta"]
        frequency = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        position = torch.arange(start, start + len(rows), dtype=torch.float64)
        angle = torch.outer(position, frequency)
        cos, sin = angle.cos().float(), angle.sin().float()
        first, second = heads.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def _norm(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.weights[f"{name}.weight"]
        mean = rows.pow(2).mean(-1, keepdim=True)
        return rows * torch.rsqrt(mean + self.config["rms_norm_eps"]) * weight

    def _embed(self, tokens: list[int]) -> torch.Tensor:
        return self.target.get_input_embeddings()(torch.tensor(tokens))
