"""Integrations: what some training frameworks need beside ``register`` and ``LocalSGD``.

Each module needs its framework, and nothing else in torchcomp imports it:

- :mod:`torchcomp.integrations.lightning`: callbacks for Lightning's Trainer;
- :mod:`torchcomp.integrations.fabric`: the DDP model of Lightning Fabric;
- :mod:`torchcomp.integrations.transformers`: callbacks for the Trainer of transformers.

Accelerate and Ray Train need no module: call ``register`` on the model that they prepared.
"""
