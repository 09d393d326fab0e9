"""Guard policy: find a non-finite value, locate its origin, decide what runs in higher precision."""
