"""Doctor: measure the ranks of a job, their links and a training step, and say what is wrong."""

from torchcomp.advisor.doctor.command import examine as examine
