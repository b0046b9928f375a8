"""The script for plain torchrun resumes bit for bit, with compression and inside a round."""

from types import SimpleNamespace

import pytest
import torch

from recipes.integrations import plain_torchrun
from tests.support.outcomes import messages_of, same
from tests.support.ranks import on_processes


def trained(folders, method):
    """Train in one go, and with an interruption. Compare the accuracies; return the last states."""
    whole, interrupted = (SimpleNamespace(out=folder, stop=100, **method) for folder in folders)
    expected = plain_torchrun.train(whole)
    for interrupted.stop in (25, 100):
        accuracy = plain_torchrun.train(interrupted)
    rank = torch.distributed.get_rank()
    states = [torch.load(f"{folder}/rank{rank}.pt", weights_only=True) for folder in folders]
    return accuracy == expected, states


# 25 is no multiple of 10, so the run is interrupted inside a round.
@pytest.mark.parametrize(("compress", "sync"), [("ef(topk(0.01))", None), (None, "every(10)")])
def test_the_script_resumes_bit_for_bit(compress, sync, tmp_path):
    folders = tmp_path / "whole", tmp_path / "interrupted"
    for folder in folders:
        folder.mkdir()
    for equal, states in on_processes(2, trained, folders, {"compress": compress, "sync": sync}):
        assert equal
        assert same(*map(messages_of, states))
