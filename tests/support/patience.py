"""How long a test waits for another process or thread before it calls that hung."""

# Seconds; many times what anything here takes alone, so that a busy machine fails no test.
PATIENCE = 200
