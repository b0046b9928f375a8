"""One rank over NCCL: equality with plain DDP, conservation, resumption, swaps and loss scales."""

import pytest
import torch
from torch import Tensor

from tests.gpu.compiler import c_compiler
from tests.gpu.place import DEVICE, GPUS, REHEARSAL, WIDTH, delayed, gpu
from tests.gpu.training import PLAIN, Run, model_of, trained
from tests.support.models import CONSERVING, THROUGH_DDP, Account, assert_conserved, residual_norm

pytestmark = pytest.mark.usefixtures("one_rank")

STEPS = 6


# --- Sums of gradients ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spec", ["mean", "ef(topk(1.0))"])
def test_a_method_that_sends_everything_equals_plain_ddp(spec: str, dtype: torch.dtype) -> None:
    plain = trained(PLAIN, dtype=dtype)
    assert torch.equal(trained(spec, dtype=dtype), plain)
    assert not torch.equal(trained("topk(0.5)", dtype=dtype), plain)


def accounted(run: Run, steps: int = STEPS) -> Account:
    for step in range(steps):
        run.account.step(run.model, (run.rows(step),), optimizer=run.optimizer)
    run.close()
    return run.account.close(run.handle)


NARROW = "ef(topk(0.1))", 'bidirectional(topk(0.1), topk(0.1), selection="exact")'


@pytest.mark.parametrize(
    ("spec", "dtype", "tolerance"),
    [(spec, torch.float64, 1e-12) for spec in CONSERVING]
    + [(s, d, 1e-5) for s in NARROW for d in (torch.float32, torch.float16, torch.bfloat16)],
)
def test_the_sum_of_all_gradients_is_conserved(
    spec: str, dtype: torch.dtype, tolerance: float
) -> None:
    assert_conserved([accounted(Run(spec, dtype=dtype))], tolerance)


# --- Checkpoints and swaps ------------------------------------------------------------------------


def churn() -> None:
    """Allocate and free blocks of all sizes. Memory that was freed too early is overwritten."""
    for size in (1, WIDTH, WIDTH * WIDTH, 4 * WIDTH * WIDTH):
        blocks = [torch.full((size,), torch.nan, device=DEVICE) for _ in range(10)]
        del blocks


@pytest.mark.parametrize("stream", ["none", "backward", "exchange"])
@pytest.mark.parametrize("spec", THROUGH_DDP)
def test_a_resumed_run_is_bit_identical(spec: str, stream: str) -> None:
    """Resume again and again, while one stream lags behind and memory is reused."""
    whole, resumed = Run(spec), Run(spec)
    with delayed(stream, whole.model), delayed(stream, resumed.model):
        for stop in range(0, STEPS, 2):
            resumed.train(0, 1)  # something to overwrite
            resumed.load(whole.save())
            churn()
            resumed.backward(stop)
            churn()
            resumed.optimizer_step()
            resumed.train(stop + 1, stop + 2)
            whole.train(stop, stop + 2)
            assert torch.equal(resumed.weights(), whole.weights()), stop
            assert torch.equal(resumed.residual(), whole.residual()), stop
    whole.close()
    resumed.close()


@pytest.mark.parametrize("stream", ["none", "backward", "exchange"])
def test_a_swap_sends_the_residual(stream: str) -> None:
    run = Run("ef(topk(0.1))", dtype=torch.float64)
    with delayed(stream, run.model):
        for step, spec in enumerate(["", "", "mean", "", "ef(topk(0.2))", "", "ef(identity)", ""]):
            if spec:
                run.handle.swap(spec)
                churn()
            run.account.step(run.model, (run.rows(step),), optimizer=run.optimizer)
            if step == 3:
                assert residual_norm(run.handle) == 0
    run.close()
    assert_conserved([run.account.close(run.handle)])


@pytest.mark.parametrize("stream", ["none", "backward", "exchange"])
def test_auto_trains_as_mean_while_it_times_candidates(stream: str) -> None:
    run, plain = Run("auto(candidates=[ef(topk(0.1))], steps=20)"), Run("mean")
    with delayed(stream, run.model):
        run.train(0, 15)
    plain.train(0, 15)
    assert torch.equal(run.weights(), plain.weights())
    assert run.handle.choice is None
    run.train(15, 25)
    assert run.handle.choice.seconds.keys() == {"mean", "ef(topk(0.1))"}
    assert all(seconds > 0 for seconds in run.handle.choice.seconds.values())
    run.close()
    plain.close()


# --- Loss scales, and values that are not finite --------------------------------------------------


@pytest.mark.parametrize("spec", ["mean", "ef(topk(0.1))", "dgc(topk(0.1))", "ef21(topk(0.1))"])
def test_an_overflow_skips_the_step_and_the_state_stays(spec: str) -> None:
    run = Run(spec, scale=64.0).train(0, 3)
    weights, state = run.weights(), run.residual()
    first = next(run.model.module.parameters())
    hook = first.register_hook(lambda gradient: gradient.fill_(torch.inf))
    run.train(3, 4)
    hook.remove()
    assert run.scaler.get_scale() == 32.0
    assert torch.equal(run.weights(), weights)
    # The state follows the loss scale when the next step begins.
    assert torch.equal(run.residual(), state)
    run.train(4, 6)
    assert run.weights().isfinite().all()
    assert not torch.equal(run.weights(), weights)
    run.close()


# --- Other ways to train --------------------------------------------------------------------------


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Require the same training run, where the kernels of the model may round differently."""
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("spec", ["mean", "ef(topk(0.1))"])
@pytest.mark.parametrize("index", range(GPUS))
def test_without_set_device(index: int, spec: str) -> None:
    """The model may be on another device than the current one."""
    place = gpu(index)
    run = Run(spec, place=place).train(0, STEPS)
    assert_near(run.weights(), trained(spec, STEPS, place=gpu(0)))
    saved = run.save()
    resumed = Run(spec, place=place).load(saved)
    assert torch.equal(resumed.train(STEPS, 8).weights(), run.train(STEPS, 8).weights())
    if not REHEARSAL:
        assert torch.cuda.current_device() == 0
    run.close()
    resumed.close()


@pytest.mark.parametrize("spec", ["mean", "ef(topk(0.1))"])
def test_a_compiled_model(spec: str) -> None:
    if not REHEARSAL:
        pytest.importorskip("triton", reason="inductor needs Triton on a GPU")
        if c_compiler() is None:
            pytest.skip("Triton needs a C compiler")
    backend = "aot_eager" if REHEARSAL else "inductor"
    module = torch.compile(model_of().to(DEVICE), backend=backend)
    # With the default bucket size: torch splits the compiled graph at buckets of 1 MiB or more.
    compiled = Run(spec, module=module, bucket_cap_mb=None).train(0, STEPS)
    assert compiled.handle.stats.steps == STEPS
    eager = trained(spec, STEPS, bucket_cap_mb=None)
    assert_near(compiled.weights(), eager)
    compiled.close()
