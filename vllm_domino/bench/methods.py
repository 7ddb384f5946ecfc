# SPDX-License-Identifier: Apache-2.0
"""What is compared: a name, and the speculative config that it stands for."""

import importlib.util
import json
from dataclasses import dataclass
from typing import Any

from vllm_domino.draft import Draft
from vllm_domino.errors import DraftConfigError

# vLLM's prompt lookup: the n-grams that it looks for.
_NGRAM = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
# As many tokens as a method drafts that has no trained block.
_USUAL_DRAFTS = 4
NAMES = ("none", "ngram", "suffix", "dflash", "domino")


@dataclass(frozen=True)
class Method:
    """
    Attributes:
        name: As it is shown.
        config: vLLM's speculative config; None for plain decoding.
    """

    name: str
    config: dict[str, Any] | None


@dataclass(frozen=True)
class Choice:
    """What a user compares.

    Attributes:
        names: Of ``NAMES``, or LABEL={...} with any speculative config.
        draft: The Domino draft.
        dflash: The DFlash draft.
        num_drafts: Each speculative method is run with each of these; with what it was
            trained for if there are none.
    """

    names: list[str]
    draft: str | None = None
    dflash: str | None = None
    num_drafts: tuple[int, ...] = ()

    def methods(self) -> list[Method]:
        """Those that were asked for, in order.

        Raises:
            DraftConfigError: A name is not known, or its draft or package is missing.
        """
        found: list[Method] = []
        for name in self.names:
            found += self._of(name)
        doubled = {m.name for m in found if [o.name for o in found].count(m.name) > 1}
        if doubled:
            raise DraftConfigError(
                f"--method {', '.join(sorted(doubled))} is there twice."
            )
        return found

    def _of(self, name: str) -> list[Method]:
        if name == "none":
            return [Method(name, None)]
        if "=" in name:
            return [_named(name)]
        config = self._config(name)
        counts = self.num_drafts or (self._own_drafts(name),)
        return [
            Method(f"{name}, K {count}", config | {"num_speculative_tokens": count})
            for count in counts
        ]

    def _config(self, name: str) -> dict[str, Any]:
        if name == "ngram":
            return {"method": "ngram", **_NGRAM}
        if name == "suffix":
            if importlib.util.find_spec("arctic_inference") is None:
                raise DraftConfigError(
                    "--method suffix is vLLM's suffix decoding, which needs the "
                    "package arctic-inference. Install it, or leave the method out."
                )
            return {"method": "suffix"}
        drafts = {"domino": self.draft, "dflash": self.dflash}
        if name not in drafts:
            raise DraftConfigError(
                f"--method is {name!r}; known are {', '.join(NAMES)}, and "
                "LABEL={...} with a speculative config."
            )
        draft = drafts[name]
        if draft is None:
            option = {"domino": "--draft", "dflash": "--dflash"}[name]
            raise DraftConfigError(f"--method {name} needs {option}, its draft.")
        return {"method": name, "model": draft}

    def _own_drafts(self, name: str) -> int:
        if self.draft is None:
            return _USUAL_DRAFTS
        # All with as many as the Domino draft was trained for, so that they compare.
        return Draft.open(self.draft).config.max_drafts


def _named(given: str) -> Method:
    label, _, text = given.partition("=")
    try:
        config = json.loads(text)
    except ValueError as error:
        raise DraftConfigError(f"--method {label}: it is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise DraftConfigError(f"--method {label}: expected a JSON object.")
    return Method(label, config)
