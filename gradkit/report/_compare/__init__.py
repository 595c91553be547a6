"""`compare`: where torch's ways to a gradient differ, and why."""
