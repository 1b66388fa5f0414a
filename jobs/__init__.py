"""What a job is: schemas, ledger, store, plan and results. The vocabulary `api` and `worker` share."""
