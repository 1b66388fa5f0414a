"""The tests of `longhaul generate` with real engines and servers."""
