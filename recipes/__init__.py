"""Training recipes: `python -m recipes.train --help`; each sub-package reproduces one paper."""
