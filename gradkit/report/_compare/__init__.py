"""`compare`: where torch's methods give different gradients, and why."""
