"""Weights of 4 or 8 bits: made from full ones, or read from a checkpoint that has them."""
