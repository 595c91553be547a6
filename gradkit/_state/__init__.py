"""State that a call puts back: random numbers, `.grad`, memory that a step writes to."""
