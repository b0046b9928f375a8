"""Routes: how the messages of all ranks become their mean. One route per file."""

from torchcomp.routes.allgather import AllGatherRoute
from torchcomp.routes.allreduce import AllReduceRoute
from torchcomp.routes.base import Route
from torchcomp.routes.sharded import ShardedRoute

__all__ = ["AllGatherRoute", "AllReduceRoute", "Route", "ShardedRoute"]
