"""What matrix/default.yaml compiles is called with this."""

from transformers import GPT2LMHeadModel


def model():
    """GPT2LMHeadModel of transformers, with random weights; nothing is downloaded."""
    config = GPT2LMHeadModel.config_class(
        vocab_size=101,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=128,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)
# written by pytest-torchcompile, 4182b2daf4bb: without this line, or edited, the file is yours
