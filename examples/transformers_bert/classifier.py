"""A classifier of sentences on top of BERT; tiny and with random weights here, so that nothing is downloaded."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel


class SentenceClassifier(nn.Module):
    """Token numbers in, logits of the classes out."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        config = BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                            intermediate_size=64, max_position_embeddings=64)
        self.bert = BertModel(config)
        self.head = nn.Linear(32, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """From (batch, time) to (batch, classes)."""
        return self.head(self.bert(input_ids, attention_mask=attention_mask).pooler_output)


def sentences(B: int, S: int) -> dict[str, Tensor]:
    """One batch as a tokeniser makes it: the second half of the last sentence is padding."""
    mask = torch.ones(B, S, dtype=torch.long)
    mask[-1, S // 2:] = 0
    return {"input_ids": torch.randint(5, 100, (B, S)), "attention_mask": mask}
