"""close() restores the model, the optimizer and the scaler."""

import gc
import weakref

import pytest
import torch

import torchcomp
from tests.local_sgd.script import Script, constant, mlp, sgd, synchronised_steps
from tests.support.logs import messages_of
from tests.support.ranks import on_threads


def installed(script):
    """Everything on the user's objects that local steps can change."""
    model, optimizer, module = script.model, script.optimizer, script.model.module
    return [
        sorted(vars(model)),
        [len(each._forward_pre_hooks) for each in module.modules()],
        len(module._state_dict_pre_hooks),
        len(optimizer._optimizer_step_pre_hooks),
        len(optimizer._optimizer_step_post_hooks),
        type(model.reducer),
        (model.require_backward_grad_sync, model.broadcast_buffers),
        sorted(vars(script.scaler)),
    ]


def test_close_leaves_nothing_behind():
    def body():
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        script = Script(spec=None, scaler=scaler, optimizer=sgd)
        before = installed(script)
        options = {"total_steps": 2, "scaler": scaler, "overlap": True}
        # A constructor that fails changes nothing.
        for optimizer, spec in [
            (script.optimizer, "every(0)"),
            (torch.optim.SGD(mlp().parameters(), lr=constant(0)), "every(2)"),
        ]:
            with pytest.raises(torchcomp.SpecError):
                torchcomp.LocalSGD(script.model, optimizer, spec, **options)
        failed = installed(script)
        sync = torchcomp.LocalSGD(script.model, script.optimizer, "every(2)", **options)
        during = installed(script)
        script.train(0, 2)
        sync.close()
        sync.close()
        return before, failed, during, installed(script)

    for before, failed, during, after in on_threads(2, body):
        assert before == failed == after
        assert all(a != b for a, b in zip(before, during, strict=True))


def test_local_steps_between_plain_ddp_training():
    def body():
        script = Script(spec=None, optimizer=sgd, gradient_as_bucket_view=True)
        weights = script.train(0, 3)
        sync = torchcomp.LocalSGD(script.model, script.optimizer, "every(2)", total_steps=4)
        weights += script.train(3, 7)
        sync.close()
        return weights + script.train(7, 9)

    assert synchronised_steps(on_threads(2, body)) == [1, 2, 3, 5, 7, 8, 9]


@pytest.mark.parametrize(
    ("close", "steps", "warnings"), [(True, 3, 0), (True, 4, 1), (False, 4, 1)]
)
def test_an_end_inside_a_round_logs_one_warning_a_rank(close, steps, warnings, caplog):
    gc.collect()  # objects that earlier tests dropped log their warnings now
    caplog.clear()

    def body():
        script = Script("every(3)", total_steps=6)
        script.train(0, steps)
        for _ in range(2 * close):
            script.sync.close()

    on_threads(2, body)
    gc.collect()
    messages = messages_of("local_sgd", caplog)
    assert len(messages) == 2 * warnings
    assert all("step 4" in message and "3 to 6" in message for message in messages)


def test_a_script_that_is_dropped_is_collected_even_if_its_parameters_hold_the_optimizer():
    def body():
        script = Script("every(3)", total_steps=6)
        script.train(0, 4)
        script.model.module[0].weight.optimizer = script.optimizer
        return weakref.ref(script.sync), weakref.ref(script.model), weakref.ref(script.optimizer)

    (held,) = on_threads(1, body)
    gc.collect()
    assert [each() for each in held] == [None] * 3


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_closing_leaves_other_local_steps_of_the_same_scaler_alone(order):
    """Train two models with one scaler; the local steps of one end before the other's."""

    def body():
        scaler, seen = torch.amp.GradScaler("cpu", init_scale=4.0), []
        scripts = [Script("every(2)", 8, scaler=scaler, optimizer=sgd) for _ in range(2)]
        closed, remaining = (scripts[index] for index in order)
        for step in range(6):
            if step == 2:
                closed.sync.close()
            for script in scripts:
                script.optimizer.zero_grad()
                bad = (script.rank, step) == (1, 3) and script is remaining
                script.backward(step, scale=float("inf") if bad else 1.0)
                script.scaler.step(script.optimizer)
                script.scheduler.step()
            scaler.update()
            seen.append(remaining.weights())
        assert closed.sync.stats.steps == 2
        remaining.sync.close()
        return seen

    assert synchronised_steps(on_threads(2, body)) == [2, 4, 6]
