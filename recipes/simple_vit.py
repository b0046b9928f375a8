"""Simple ViT: a vision transformer without a class token, with fixed positions and mean pooling.

Source: Beyer, Zhai, Kolesnikov, "Better plain ViT baselines for ImageNet-1k", 2022 (arXiv
2205.01580). Gu et al., ICLR 2024 (arXiv 2310.14423), train it as ViT-B. Neither torchvision nor
timm has a model with these position embeddings.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_EPS = 1e-6
_LONGEST_WAVE = 10_000


@dataclass(frozen=True)
class Size:
    """Side of a patch in pixels, embedding width, number of blocks and heads, width of the MLP."""

    patch: int
    width: int
    depth: int
    heads: int
    mlp: int


SIZES = {
    "b16": Size(patch=16, width=768, depth=12, heads=12, mlp=3072),
    "ti16": Size(patch=16, width=192, depth=12, heads=3, mlp=768),
}


class SimpleViT(nn.Module):
    """Patch and position embeddings, pre-norm blocks, norm, mean over patches, linear head."""

    def __init__(self, size: Size, channels: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, size.width, size.patch, stride=size.patch)
        # Not nn.TransformerEncoder: it copies one block, so all would start with the same weights.
        self.blocks = nn.Sequential(*(encoder_block(size, _EPS) for _ in range(size.depth)))
        self.norm = nn.LayerNorm(size.width, eps=_EPS)
        self.head = nn.Linear(size.width, classes)
        _initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores of shape (N, classes)."""
        rows, columns = patch_grid(images, self.patches.kernel_size[0])
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        tokens = tokens + sin_cos_positions(tokens.shape[-1], rows, columns, like=tokens)
        scores: Tensor = self.head(self.norm(self.blocks(tokens)).mean(1))
        return scores


def patch_grid(images: Tensor, side: int) -> tuple[int, int]:
    """Return the number of rows and columns of patches with ``side`` pixels per side."""
    height, width = images.shape[-2:]
    if height % side or width % side:
        raise ValueError(f"height and width must be multiples of the patch size {side}")
    return height // side, width // side


def encoder_block(size: Size, eps: float) -> nn.TransformerEncoderLayer:
    """Return a pre-norm block without dropout: attention, then the MLP. ``eps`` is the norms'."""
    return nn.TransformerEncoderLayer(
        size.width,
        size.heads,
        size.mlp,
        dropout=0.0,
        activation="gelu",
        layer_norm_eps=eps,
        batch_first=True,
        norm_first=True,
    )


def _initialise(model: SimpleViT) -> None:
    """Initialise all matrices with Xavier, and the head with 0: all classes start equal."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.ndim > 1:
            # in_proj holds three matrices (queries, keys, values), and Xavier depends on the shape.
            for matrix in parameter.flatten(1).chunk(3 if "in_proj" in name else 1):
                nn.init.xavier_uniform_(matrix)
    nn.init.zeros_(model.head.weight)


def sin_cos_positions(width: int, rows: int, columns: int, *, like: Tensor) -> Tensor:
    """Return the position embeddings of shape (rows * columns, width): sines and cosines."""
    # In float32 also under bf16 models, which cannot represent all positions.
    options: dict[str, Any] = {"device": like.device, "dtype": torch.float32}
    powers = torch.arange(width // 4, **options) / (width // 4 - 1)
    frequencies = _LONGEST_WAVE**-powers
    y, x = torch.meshgrid(
        torch.arange(rows, **options), torch.arange(columns, **options), indexing="ij"
    )
    x, y = (position.flatten()[:, None] * frequencies for position in (x, y))
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1).to(like.dtype)
