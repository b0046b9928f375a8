"""A local step without a synchronisation makes few calls, in few files."""

import sys
from pathlib import Path

import torchcomp
from tests.local_sgd.script import Script, mlp, sgd
from tests.support.ranks import on_processes

PACKAGE = str(Path(torchcomp.__file__).parent)


def calls_of(function):
    """The file of every call of a torchcomp function."""
    files = []

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            files.append(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return files


def of_a_local_step():
    script = Script("every(4)", total_steps=12, build=lambda: mlp(16), optimizer=sgd)
    script.train(0, 5)
    script.optimizer.zero_grad()
    script.backward(5)
    return calls_of(script.optimizer.step)


def test_a_local_step_makes_at_most_9_calls_in_2_files():
    # In processes of their own: hooks of DDP models, of other tests, would be counted as well.
    for files in on_processes(2, of_a_local_step):
        assert 0 < len(files) <= 9
        assert set(files) <= {"local_sgd/hooks.py", "local_sgd/local_steps.py"}
