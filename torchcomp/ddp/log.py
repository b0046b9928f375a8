"""What `register` logs once, on one rank."""

import logging

from torchcomp.aggregators import Mean
from torchcomp.ddp.buckets import Buckets
from torchcomp.ddp.loop import OptimizerLRs
from torchcomp.engine.stats import sent_instead
from torchcomp.exchange.traffic import Traffic

_log = logging.getLogger(__name__)


def log_method(buckets: Buckets, planned: Traffic, between: str, lrs: OptimizerLRs | None) -> None:
    """Log what was registered, and warn if the method or `lr_inside` does not fit training."""
    averager = buckets.averager
    aggregator = averager.aggregator
    warmup_steps = aggregator.stages[-1]
    _log.info(
        "registered %s: %d parameters with %s elements, groups: %d, per step%s%s %s",
        aggregator,
        len(averager.parameters),
        f"{sum(each.numel() for each in buckets.parameters.values()):,}",
        len(averager.buckets),
        f" after the first {warmup_steps:,}" if warmup_steps else "",
        f" between {between}" if between else "",
        sent_instead(planned.sent, planned.dense),
    )
    if isinstance(aggregator, Mean) and aggregator.loses:
        _log.warning(
            "%s keeps no residual, so the part of the gradient that it does not send is lost. "
            "Use ef(%s) to send it in later steps",
            aggregator,
            aggregator.compressor,
        )
    if lrs is not None and lrs.unfit:
        _log.warning(
            "lr_inside is meant for SGD without momentum, but the optimizer is %s. A momentum "
            "multiplies what was sent by later learning rates, and Adam divides the unit away. "
            "Leave out lr_inside",
            ", ".join(lrs.unfit),
        )
