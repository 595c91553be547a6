"""`conflicts`: which losses have gradients that oppose each other."""
