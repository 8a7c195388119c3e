"""A small random Llama with a real tokenizer: fast enough to serve hundreds of requests in a test.

Its words mean nothing; what it is for is memory: pages, rows, evictions, retractions.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM


def save_tiny_model(folder: Path, tokenizer_from: Path) -> Path:
    """Write a 2-layer Llama (seeded weights, float32) with the tokenizer of another model folder.

    Returns `folder`.
    """
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_from, local_files_only=True)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    torch.manual_seed(11)
    LlamaForCausalLM(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
