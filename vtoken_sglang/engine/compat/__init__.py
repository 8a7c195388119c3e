"""What is refused, by name, before anything would be half-served."""
