"""`python -m gradkit migrate`: moves training loops from `.grad` to gradients that are values.

A file is read with `ast` and what is sure is decided there (program, origins, optimizers, calls,
hazards, statements, loops); the decided edits are made with libcst, which keeps the format
(rewriting). What is left has a reason (reasons), and what to do by hand (advice).
"""
