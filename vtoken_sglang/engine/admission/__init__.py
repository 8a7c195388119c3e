"""What requests are charged, how long they may become, and what is done when the pool is short."""
