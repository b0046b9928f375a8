"""Measured values of jobs that the tests of doctor share."""

from dataclasses import replace

from torchcomp.advisor.doctor.measures import Facts, Link

SOFTWARE = {"torch": "2.13.0", "torchcomp": "0.1.0", "python": "3.11.7", "kernels": "Numba"}
SOFTWARE |= {"nccl": "", "driver": "", "gpu": ""}
MACHINE = {"host": "host", "backend": "gloo", "node": 0, "local_world_size": 4, "cores": 8}
MACHINE |= {"threads": 2, "omp_num_threads": "2", "shm_bytes": 10**10, "shm_free": 10**10}
FACTS = Facts(**SOFTWARE, **MACHINE, address="10.0.0.1", interface="eth0", mtu=1500)
SIZE = 2**24


def facts(world_size, **odd):
    """Facts of some ranks, of which the last one differs."""
    return [FACTS] * (world_size - 1) + [replace(FACTS, **odd)]


def link(source, target, mbytes=100.0, *, trip=1e-4, inside=False, error=""):
    """A link with this bandwidth in MB/s."""
    points = ((SIZE, SIZE / (mbytes * 1e6) + trip),)
    return Link(source, target, inside, trip, () if error else points, error)


def mesh(world_size, mbytes=lambda source, target: 100.0, **options):
    """All links between some ranks."""
    ranks = range(world_size)
    return [link(i, j, mbytes(i, j), **options) for i in ranks for j in ranks if i != j]
