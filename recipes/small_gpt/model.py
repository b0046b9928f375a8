"""A small decoder-only transformer with pre-norm blocks (Radford et al., GPT-2, 2019)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


@dataclass(frozen=True)
class Shape:
    vocabulary: int  # number of tokens
    context: int = 32  # longest sequence
    layers: int = 2  # number of blocks
    heads: int = 2  # attention heads per block
    width: int = 64  # features per token, a multiple of `heads`


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then two linear layers, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.narrow(gelu(self.widen(self.norm2(x))))


class SmallGPT(nn.Module):
    """Predicts the next token of every prefix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(Block(shape.width, shape.heads) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for module in self.modules():
            # The default of a Linear keeps the scale of its input. That of an Embedding is 1.
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, time) to logits (batch, time, vocabulary)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits
