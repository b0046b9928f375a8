"""How long a test waits for another process or thread before it fails as hung."""

# In seconds. Far longer than any test needs alone, so that no test fails on a busy machine.
PATIENCE = 500
