"""Tiny random models of transformers and data for them; nothing is downloaded."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from helpers.seeds import seed_of

VOCABULARY = 64
LENGTH = 12
# For generate(): padding, and two tokens that end or begin a sequence.
PAD, BOS, EOS = 0, 1, 2
TOKENS: dict[str, int] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}

Data = list[dict[str, torch.Tensor]]


def llama() -> nn.Module:
    """Return a LlamaForCausalLM of 3 layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **TOKENS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    """Return a GPT2LMHeadModel of 2 layers; head and embedding are one parameter."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        **TOKENS,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def t5() -> nn.Module:
    """Return a T5ForConditionalGeneration of 2 + 2 blocks, embeddings shared."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        **TOKENS,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=PAD,
    )
    return T5ForConditionalGeneration(config)


def lora() -> nn.Module:
    """Return the Llama, frozen, with LoRA adapters at two of its projections."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=0.0,
        target_modules=["q_proj", "v_proj"],
        init_lora_weights=False,  # else B is zero, and A has no gradient at first
        task_type="CAUSAL_LM",
    )
    adapted: nn.Module = get_peft_model(llama(), config)  # type: ignore[arg-type]
    return adapted


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "gpt2": gpt2,
    "t5": t5,
    "lora": lora,
}


def build(name: str) -> nn.Module:
    """Return the model ``name`` on the CPU: the same weights in every process."""
    with torch.random.fork_rng(), torch.device("cpu"):
        torch.manual_seed(seed_of("huggingface", name))
        return BUILDERS[name]()


def data(name: str, num_examples: int) -> Data:
    """Return examples for the model ``name``, equal in every process.

    Those of the causal models have labels of -100 at different numbers of places: a
    mean over each rank's tokens is not the mean over all.
    """
    generator = torch.Generator().manual_seed(seed_of("huggingface", "data", name))
    draw = functools.partial(
        torch.randint, 3, VOCABULARY, generator=generator, device="cpu"
    )
    examples = []
    for index in range(num_examples):
        ids = draw((LENGTH,))
        if name == "t5":
            labels = draw((LENGTH // 2,))
        else:
            labels = ids.clone()
            labels[: (5 * index) % (LENGTH - 3)] = -100
        examples.append({"input_ids": ids, "labels": labels})
    return examples


def layer_class(name: str) -> str:
    """Return the class of the blocks of the model ``name``."""
    return {"gpt2": "GPT2Block", "t5": "T5Block"}.get(name, "LlamaDecoderLayer")


def numel(model: nn.Module) -> int:
    """Return the elements of the parameters, shared ones counted once."""
    return sum(each.numel() for each in model.parameters())


def clean(model: Any) -> dict[str, torch.Tensor]:
    """Return copies of the parameters by name, on the CPU."""
    return {n: p.detach().cpu().clone() for n, p in model.named_parameters()}
