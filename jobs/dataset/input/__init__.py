"""Rows in: files, buckets and tables, streamed, each row with its number."""
