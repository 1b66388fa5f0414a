"""A tiny random model for tests, of ours and of users: real files, a chat template, loaded in a second."""

import sys
from pathlib import Path

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tiny_model(path: str | Path, seed: int = 0, context_tokens: int = 2048) -> Path:
    """Write a random 2-layer Llama with a byte-level tokenizer (one token a byte) to a directory; return it.

    Its outputs vary, are printable ASCII when greedy, and end by themselves now and then.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(context_tokens)
    tokenizer.save_pretrained(path)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context_tokens,
        tie_word_embeddings=False,
        initializer_range=0.2,  # large, so that the output depends on the whole prompt
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    printable = [
        tokenizer.convert_tokens_to_ids(token) for token in (*map(_token_of, range(32, 127)), "<|im_end|>")
    ]
    hidden = torch.ones(len(tokenizer), dtype=torch.bool)
    hidden[printable] = False
    with torch.no_grad():
        model.lm_head.weight[hidden] = 0.0
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end)
    model.save_pretrained(path)
    return path


def _token_of(byte: int) -> str:
    return "Ġ" if byte == 32 else chr(byte)


def _tokenizer(context_tokens: int):  # type: ignore[no-untyped-def]
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: id for id, token in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(_SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        model_max_length=context_tokens,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


if __name__ == "__main__":
    print(tiny_model(sys.argv[1]))
