"""Products, attention and draws on a CPU in C++, compiled for the machine when an engine first needs them."""
