"""An emulated accelerator: what a second kind of device does, in the host's memory.

`GRADKIT_EMULATE=cuda pytest tests/eager` runs tests on it, as `make accelerator` does. The device
is in `library/`, in C++; `build.py` compiles it, `emulation.py` starts it.
"""
