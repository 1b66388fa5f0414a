"""The Celery worker that runs a model: `celery -A worker worker`. Celery itself finds `worker.celery`."""
