"""2Direction against EF21-P + DIANA, accelerated gradient descent and others."""
