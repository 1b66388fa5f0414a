"""The submission API: authenticate, validate, store, enqueue, report. Never imports torch, nor worker."""
