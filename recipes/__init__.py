"""Training recipes: `python -m recipes.train --help`. Each sub-package reproduces one paper."""
