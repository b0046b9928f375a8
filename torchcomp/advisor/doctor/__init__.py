"""Doctor: measure the ranks of a job, their links and a training step, and say what is wrong.

``torchrun ... -m torchcomp doctor`` runs it; docs/doctor.md explains the report.
"""

from torchcomp.advisor.doctor.command import examine

__all__ = ["examine"]
