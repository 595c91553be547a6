"""State that a call puts back: random numbers, `.grad`, what a step has written on."""
