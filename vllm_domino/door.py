# SPDX-License-Identifier: Apache-2.0
"""The config door: from a user's speculative config to one that vLLM understands.

vLLM's ``method`` is a closed list, so Domino goes in as ``dflash`` and the draft's
architecture says the rest. Everything that can be wrong with a draft is found here,
before an engine starts: its config, whether it fits the target, and its weights.
"""

import logging
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vllm_domino.backbone import require_backbone
from vllm_domino.checkpoint import check_folder
from vllm_domino.config import DraftConfig, Drafting, RuntimeConfig
from vllm_domino.config_file import looks_local, read_config
from vllm_domino.errors import DraftConfigError
from vllm_domino.fit import TargetShape, require_fit
from vllm_domino.makers import is_domino, read
from vllm_domino.makers.layout import architectures, head_section
from vllm_domino.makers.meaning import unknown_fields
from vllm_domino.seams import ARCHITECTURE, register_architectures

logger = logging.getLogger("vllm.domino")

METHOD = "domino"
# Methods under which a Domino checkpoint is taken for what it is.
_DOMINO_METHODS = (METHOD, "dflash", None)
_FLAGS = {
    "method": "spec_method",
    "model": "spec_model",
    "num_speculative_tokens": "spec_tokens",
}


@dataclass(frozen=True)
class Request:
    """A speculative config that asks for Domino.

    Attributes:
        settings: The user's JSON with the ``--spec-*`` flags folded in.
        raw: The draft's parsed config.json.
        runtime: Our own keys in that JSON.
    """

    settings: dict[str, Any]
    raw: dict[str, Any]
    runtime: RuntimeConfig

    @property
    def draft(self) -> str:
        return str(self.settings["model"])


def domino_request(engine_args: Any) -> Request | None:
    """The request for Domino in these ``EngineArgs``; None if there is none, and then
    vLLM goes on as if we were not installed."""
    settings = _settings(engine_args)
    if settings is None:
        return None
    method, model = settings.get("method"), settings.get("model")
    if method == METHOD and not isinstance(model, str):
        raise DraftConfigError(
            'speculative_config has "method": "domino" but no "model". Set it to a '
            "Domino draft's folder or hub id."
        )
    if not isinstance(model, str):
        return None
    raw = _config_of(model, settings.get("revision"), required=method == METHOD)
    if raw is None or (method != METHOD and not is_domino(raw)):
        return None
    if method not in _DOMINO_METHODS:
        raise DraftConfigError(
            f"speculative_config.method is {method!r}, but {model} is a Domino draft. "
            'Set "method": "domino", or leave it out.'
        )
    return Request(settings, raw, _take_runtime(settings))


def prepare(
    engine_args: Any,
    request: Request,
    target_model_config: Any,
    target_parallel_config: Any,
) -> Drafting:
    """Checks the request and rewrites it for vLLM, in place.

    Args:
        engine_args: vLLM's ``EngineArgs``.
        request: What ``domino_request`` found.
        target_model_config: The target's ``ModelConfig``.
        target_parallel_config: Its ``ParallelConfig``.

    Returns:
        What the engine's workers must know, for ``finish``.

    Raises:
        DominoError: The draft, the target and the settings do not go together.
    """
    config, maker = read(request.raw, request.draft)
    require_backbone(request.raw, maker, request.draft)
    if ignored := unknown_fields(request.raw):
        logger.warning(
            "Domino: %s has %s in config.json, which this version does not know and "
            "does not use.",
            request.draft,
            ", ".join(ignored),
        )
    shape = TargetShape(
        name=target_model_config.model,
        hidden_size=target_model_config.get_hidden_size(),
        vocab_size=target_model_config.get_vocab_size(),
        num_layers=target_model_config.get_total_num_hidden_layers(),
    )
    require_fit(config, request.draft, shape)
    _check_target(target_model_config, target_parallel_config)
    num_drafts = _num_drafts(config, request)
    _check_settings(
        request,
        num_drafts < config.max_drafts,
        target_parallel_config.tensor_parallel_size,
    )
    if (folder := Path(request.draft)).is_dir():
        check_folder(config, maker, folder, request.runtime.allow_pickle)
    _require_readable(request)
    # vLLM looks the name in config.json up before anyone can change it.
    register_architectures(architectures(request.raw))
    for flag in _FLAGS.values():
        setattr(engine_args, flag, None)
    engine_args.speculative_config = request.settings | {
        "method": "dflash",
        "num_speculative_tokens": num_drafts,
    }
    return Drafting(draft=config, maker=maker.name, runtime=request.runtime)


def finish(config: Any, drafting: Drafting) -> Any:
    """Names our model in the ``SpeculativeConfig`` that vLLM made of the request, and
    says there, by the released drafts' names, what vLLM itself asks a draft."""
    hf_config = config.draft_model_config.hf_config
    hf_config.architectures = [ARCHITECTURE]
    hf_config.dflash_config = head_section(drafting.draft) | {"causal": False}
    hf_config.draft_vocab_size = drafting.draft.drafted_vocab
    drafting.attach(config.draft_model_config)
    config.update_arch_()
    return config


def _settings(engine_args: Any) -> dict[str, Any] | None:
    """The JSON and the flags as one; None if vLLM should see (or refuse) them as is."""
    given = engine_args.speculative_config
    flags = {
        key: value
        for key, flag in _FLAGS.items()
        if (value := getattr(engine_args, flag, None)) is not None
    }
    if not isinstance(given, dict | None) or not (given or flags):
        return None
    settings = {key.replace("-", "_"): value for key, value in (given or {}).items()}
    return None if flags.keys() & settings.keys() else settings | flags


def _config_of(
    model: str, revision: str | None, required: bool
) -> dict[str, Any] | None:
    """The draft's config.json. Where it cannot be had and Domino was not asked for by
    name, None: the config is another method's, and vLLM says what it thinks of it."""
    if required:
        return read_config(model, revision)
    if looks_local(model) and not Path(model).is_dir():
        return None
    try:
        return read_config(model, revision)
    except DraftConfigError:
        return None


def _check_target(model_config: Any, parallel_config: Any) -> None:
    if (stages := parallel_config.pipeline_parallel_size) > 1:
        raise DraftConfigError(
            f"pipeline_parallel_size is {stages}, but Domino drafts need the target's "
            "embedding and lm_head in one place. Set it to 1; tensor_parallel_size may "
            "be more."
        )
    from vllm.model_executor.models.interfaces import supports_eagle3

    target, architecture = model_config.registry.resolve_model_cls(
        model_config.architectures, model_config=model_config
    )
    if not supports_eagle3(target):
        raise DraftConfigError(
            f"the target {model_config.model} is a {architecture}, which does not hand "
            "out its layers' hidden states in this vLLM (SupportsEagle3), and Domino "
            "drafts from these. Use a target that does, such as Qwen3 or Llama."
        )


def _require_readable(request: Request) -> None:
    """Finds what else vLLM could stumble over in config.json before it does."""
    from vllm.transformers_utils.config import get_config

    try:
        get_config(
            request.draft,
            trust_remote_code=False,
            revision=request.settings.get("revision"),
        )
    except Exception as error:  # Transformers and the hub's client raise many kinds
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise DraftConfigError(
            f"{request.draft}: vLLM cannot read config.json ({first}). Mend the field "
            "it names, or export the draft again."
        ) from None


def _take_runtime(settings: dict[str, Any]) -> RuntimeConfig:
    """Removes our own keys from the settings, which vLLM would refuse."""
    taken = {
        name: settings.pop(name)
        for name in RuntimeConfig.model_fields
        if name in settings
    }
    try:
        return RuntimeConfig(**taken)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise DraftConfigError(
            f"speculative_config.{name} is {taken[name]!r}: {first['msg'].lower()}. "
            f"It is: {RuntimeConfig.model_fields[name].description}"
        ) from None


def _check_settings(request: Request, block_is_shorter: bool, ranks: int) -> None:
    from vllm.platforms import current_platform

    settings, runtime = request.settings, request.runtime
    has_kernels = current_platform.is_cpu() or find_spec("triton") is not None
    if runtime.head in ("exact", "fused") and not has_kernels:
        raise DraftConfigError(
            f'speculative_config.head is "{runtime.head}", which needs Triton on this '
            "device, and there is none. Leave it out."
        )
    if runtime.project_embeddings and ranks > 1:
        raise DraftConfigError(
            "speculative_config.project_embeddings is set, but with "
            f"tensor_parallel_size {ranks} no rank has the whole embedding. Leave it "
            "out, or set tensor_parallel_size to 1."
        )
    if settings.get("use_local_argmax_reduction"):
        raise DraftConfigError(
            "speculative_config.use_local_argmax_reduction is set, but Domino corrects "
            "logits before it picks. Leave it out: ranks exchange one pair a draft as "
            "it is."
        )
    if (
        settings.get("enable_adaptive_verification")
        and block_is_shorter
        and request.runtime.draft_block == "trained"
    ):
        raise DraftConfigError(
            "speculative_config.enable_adaptive_verification is set, and draft_block "
            'is "trained" with fewer tokens than the block has. vLLM\'s estimator '
            'cannot follow that: set draft_block to "short", or leave '
            "num_speculative_tokens out."
        )


def _num_drafts(config: DraftConfig, request: Request) -> int:
    wanted = request.settings.get("num_speculative_tokens")
    if wanted is None:
        return config.max_drafts
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
        raise DraftConfigError(
            f"speculative_config.num_speculative_tokens is {wanted!r}; expected 1 to "
            f"{config.max_drafts} for {request.draft}, or leave it out for "
            f"{config.max_drafts}."
        )
    if wanted > config.max_drafts:
        raise DraftConfigError(
            f"speculative_config.num_speculative_tokens is {wanted}, but "
            f"{request.draft} was trained to draft {config.max_drafts} (block_size "
            f"{config.block_size}, shift_label {str(config.shift_label).lower()}). "
            f"Set at most {config.max_drafts}, or leave it out."
        )
    return wanted
