"""transformers' architectures, tiny and random: they train like the unsharded model.

Every class of the mappings below whose configuration can be made small by the names of
its fields. Units are the modules in ``_no_split_modules``, as in Accelerate.
"""

import copy
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from helpers.distributed import distributed
from helpers.hf_models import LENGTH, TOKENS, VOCABULARY
from helpers.hf_training import BATCH, WORLD, cases, whole_weights
from helpers.impl import FSDP
from helpers.rows import shard_units

MAPPINGS = {
    "input_ids": ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM"),
    "pixel_values": ("IMAGE_CLASSIFICATION",),
}
MAX_NUMEL = 4_000_000
# With transformers 5.23 237 of 318 are trained; of a part these at least.
NUM_PARTS, MIN_TRAINED = 24, 6
# Its parent reads an embedding inside of what it lists as units (docs/guide/faq.md).
EXCLUDED = ("ModernVBertForMaskedLM",)
# Values of the fields that a configuration has.
SMALL: dict[float, str] = {
    32: """hidden_size d_model n_embd dim embed_dim emb_dim embedding_size lru_width
        image_size""",
    48: """intermediate_size ffn_dim d_ff n_inner hidden_dim encoder_ffn_dim
        decoder_ffn_dim mlp_dim ffn_hidden_size""",
    16: """moe_intermediate_size shared_expert_intermediate_size expert_dim q_lora_rank
        qk_head_dim sliding_window""",
    8: """d_kv head_dim kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim
        state_size mamba_n_heads mamba_d_head mamba_d_state mamba_num_heads
        mamba_head_dim chunk_size patch_size attention_window""",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads
        rotary_dim decoder_attention_heads num_experts num_local_experts
        n_routed_experts window_size moe_num_experts time_step_rank""",
    2: """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers
        expand num_decoder_layers num_key_value_heads num_experts_per_tok moe_topk
        type_vocab_size""",
    64: "max_position_embeddings n_positions max_seq_len n_ctx",
    1: "n_group topk_group first_k_dense_replace n_shared_experts n_groups",
    0.0: """attention_probs_dropout_prob dropout attention_dropout activation_dropout
        attn_pdrop dropout_rate layerdrop encoder_layerdrop decoder_layerdrop
        drop_path_rate""",
}


def _shrink(config: Any) -> None:
    """Make a configuration small, and those in it."""
    values = {name: value for value, names in SMALL.items() for name in names.split()}
    others = TOKENS | {"decoder_start_token_id": 0, "use_cache": False}
    if hasattr(config, "kv_lora_rank"):  # its heads are not shared
        values["num_key_value_heads"] = 4
    for name, value in (values | others).items():
        if name in others or type(getattr(config, name, None)) in (int, float):
            with suppress(Exception):
                setattr(config, name, value)
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    if kinds:
        config.num_hidden_layers = max(2, len(kinds))
        config.layer_types = (2 * kinds)[: config.num_hidden_layers]
    for inner in list(vars(config).values()):
        if hasattr(inner, "to_diff_dict"):
            _shrink(inner)


def _architectures() -> Iterator[tuple[str, Any, Any]]:
    """Yield the names of inputs, and classes of models and their configurations."""
    from transformers.models.auto import modeling_auto

    for inputs, names in MAPPINGS.items():
        for name in names:
            mapping: Any = getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING")
            for config in sorted(mapping.keys(), key=lambda each: each.__name__):
                model = mapping[config]
                model = model[0] if isinstance(model, tuple) else model
                if model.__name__ not in EXCLUDED:
                    yield inputs, model, config


def _make(model_class: Any, config_class: Any) -> nn.Module:
    config = config_class()
    _shrink(config)
    with torch.device("meta"):
        numel = sum(param.numel() for param in model_class(config).parameters())
    if numel > MAX_NUMEL:
        raise ValueError(f"{numel} parameters")
    torch.manual_seed(1)
    model: nn.Module = model_class(config).train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()  # its statistics are a rank's own
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _inputs(name: str, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    if name == "pixel_values":
        pixels = torch.randn(BATCH, 3, 32, 32, generator=generator)
        return {name: pixels, "labels": torch.arange(BATCH)}
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    return {name: ids, "labels": ids.clone()}


def _step(model: nn.Module, batches: list[dict[str, Tensor]]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        torch.manual_seed(2)
        (model(**batch).loss / len(batches)).backward()
    optimizer.step()


def _shard(model: Any, api: str) -> Any:
    names = model._no_split_modules or ()
    units = {type(each) for each in model.modules() if type(each).__name__ in names}
    if api == "FSDP":
        return FSDP(
            model,
            auto_wrap_policy=ModuleWrapPolicy(units),
            use_orig_params=True,
        )
    if getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        table = model.get_input_embeddings()  # it and the head are the root's
        units -= {type(each) for each in model.modules() if table in each.children()}
    return shard_units(model, units)


@pytest.mark.parametrize("part", cases(range(NUM_PARTS), range(1, NUM_PARTS)))
@distributed(world_size=WORLD, timeout_s=1200, device="cpu")
def test_training(rank: int, part: int) -> None:
    """One step of SGD, in both APIs; what cannot be made is counted."""
    num_trained = 0
    for inputs, model_class, config_class in list(_architectures())[part::NUM_PARTS]:
        try:
            reference = _make(model_class, config_class)
            start = copy.deepcopy(reference)
            _step(reference, [_inputs(inputs, each) for each in range(WORLD)])
        except Exception:  # of the configuration: fields that do not go together
            continue
        expected = dict(reference.named_parameters())
        for api in ("FSDP", "fully_shard"):
            model = _shard(copy.deepcopy(start), api)
            _step(model, [_inputs(inputs, rank)])
            actual = whole_weights(model)
            for name, param in expected.items():
                torch.testing.assert_close(
                    actual[name], param.detach(), msg=f"{api} {model_class} {name}"
                )
        num_trained += 1
        dist.barrier()
    assert num_trained >= MIN_TRAINED
