"""The pictures of the convergence experiment."""
from pathlib import Path
def draw_convergence(optimizer, curves, chosen, path: Path) -> None:
    pass
