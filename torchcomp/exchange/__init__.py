"""Exchange: collectives over a process group, or among threads of one process."""

from torchcomp.exchange.base import Exchange
from torchcomp.exchange.in_process import InProcessExchange, run_in_process
from torchcomp.exchange.private import InsideExchange, ManagedExchange, PrivateExchange, new_name
from torchcomp.exchange.process_group import ProcessGroupExchange

__all__ = ["Exchange", "InProcessExchange", "InsideExchange", "ManagedExchange", "PrivateExchange"]
__all__ += ["ProcessGroupExchange", "new_name", "run_in_process"]
