"""Integrations: what some frameworks need beside ``register`` and ``LocalSGD``.

Each module needs its framework: ``lightning`` and ``transformers`` have callbacks for their
Trainers, ``fabric`` finds the DDP model of Lightning Fabric.
Accelerate and Ray Train need no module: call ``register`` on the model that they prepared.
"""
