"""What matrix/default.yaml compiles is called with this."""

import torch


def batch(B, S):
    """One batch of make, as keyword arguments of its forward."""
    return {
        "x": torch.randint(3, 100, (B, S)),
    }
# written by pytest-torchcompile, 77508bacaf5b: without this line, or edited, the file is yours
