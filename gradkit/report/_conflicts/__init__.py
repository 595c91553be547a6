"""`conflicts`: how the gradients of several losses stand to each other."""
