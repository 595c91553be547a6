"""What is refused, before anything has run."""
