"""2Direction compared with EF21-P + DIANA, accelerated gradient descent and others."""
