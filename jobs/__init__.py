"""What a job is: its schemas, ledger, store, plan and results. The vocabulary that `api` and `worker` share."""
