"""Routes: from every rank's message to the mean, one way a file."""

from torchcomp.routes.allgather import AllGatherRoute
from torchcomp.routes.allreduce import AllReduceRoute
from torchcomp.routes.base import Route
from torchcomp.routes.sharded import ShardedRoute

__all__ = ["AllGatherRoute", "AllReduceRoute", "Route", "ShardedRoute"]
