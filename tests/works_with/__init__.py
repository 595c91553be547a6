"""Libraries that people use beside gradkit, one small program each: `make works-with`."""
