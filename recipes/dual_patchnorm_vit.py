"""The simple ViT of vit-pytorch, which Gu et al., ICLR 2024 (arXiv 2310.14423), train as ViT-B.

Their code calls its ``SimpleViT`` and requires version 1.2.8 (github.com/hmgxr128/QSR,
``trainer_process.py`` and ``README.md``). It differs from the simple ViT of Beyer et al. (see
``simple_vit.py``):

- attention has no biases;
- a layer norm before and after the patch embedding (Kumar, Dehghani, Houlsby, "Dual PatchNorm",
  2023, arXiv 2302.01327);
- the last layer norm follows the mean over the patches, instead of preceding it;
- the weights start as torch's layers draw them, also in the head, and layer norms use eps 1e-5.

It is written here from these facts, so vit-pytorch need not be installed.
"""

import math

from torch import Tensor, nn

from recipes.simple_vit import Size, encoder_block, patch_grid, sin_cos_positions

_EPS = 1e-5


class DualPatchNormViT(nn.Module):
    """Patch embeddings between two norms, positions, pre-norm blocks, mean, norm, linear head."""

    def __init__(self, size: Size, channels: int, classes: int) -> None:
        super().__init__()
        self.side = size.patch
        pixels = channels * size.patch**2
        self.patches = nn.Sequential(
            nn.LayerNorm(pixels, eps=_EPS),
            nn.Linear(pixels, size.width),
            nn.LayerNorm(size.width, eps=_EPS),
        )
        self.blocks = nn.Sequential(*(_block(size) for _ in range(size.depth)))
        self.norm = nn.LayerNorm(size.width, eps=_EPS)
        self.head = nn.Linear(size.width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores of shape (N, classes)."""
        rows, columns = patch_grid(images, self.side)
        # (N, C, rows, side, columns, side), then one vector of pixels per patch, channels last.
        pixels = images.unflatten(3, (columns, self.side)).unflatten(2, (rows, self.side))
        tokens = self.patches(pixels.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2))
        tokens = tokens + sin_cos_positions(tokens.shape[-1], rows, columns, like=tokens)
        scores: Tensor = self.head(self.norm(self.blocks(tokens).mean(1)))
        return scores


def _block(size: Size) -> nn.Module:
    block = encoder_block(size, _EPS)
    # The layer's own bias=False would also remove the biases of the MLP and of the norms.
    block.self_attn = nn.MultiheadAttention(size.width, size.heads, bias=False, batch_first=True)
    # As nn.Linear does. MultiheadAttention would use Xavier for queries, keys and values.
    nn.init.kaiming_uniform_(block.self_attn.in_proj_weight, a=math.sqrt(5))
    return block
