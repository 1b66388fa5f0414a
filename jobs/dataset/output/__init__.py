"""Rows out: shards of a format, what is apart from them, and the card of the dataset."""
